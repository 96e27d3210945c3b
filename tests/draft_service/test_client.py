"""Which messages a target sends to services, and which services' trees it uses."""

import logging

import msgspec

from streamserve.draft_service.target.links import RESEND_SECONDS, SILENCE_SECONDS
from streamserve.protocol.drafting import Busy, DraftRequests, Hello, Ping, Pong, Refused, Unknown
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from tests.draft_service.client_side import GREEDY, Side, welcome


def test_only_new_tokens_are_sent():
    side = Side()
    side.open()
    ((_, first),) = side.begin([1, 2, 3])
    assert (first.base, first.retained, first.tokens, first.params) == (0, 0, [1, 2, 3], GREEDY)
    side.answer(first.number, 4, 5, root=3)
    assert side.take() == (3, 4, 5)
    ((_, second),) = side.begin([4, 9], retained=3)
    assert (second.base, second.retained, second.tokens, second.params) == (1, 3, [4, 9], None)


def test_a_request_in_flight_is_not_repeated_and_its_late_tree_is_rebased():
    side = Side()
    side.open()
    ((_, first),) = side.begin([1, 2, 3])
    assert side.take() is None
    assert side.begin([4], retained=3) == []
    side.answer(first.number, 4, 5, 6, root=3)
    assert side.take() == (4, 5, 6)
    ((_, second),) = side.begin([5, 7], retained=4)
    side.answer(second.number, 8, root=7)
    side.begin([1], retained=6)
    assert side.take() is None, "the text does not follow the tree"


def test_trees_of_other_epochs_and_numbers_are_dropped():
    side = Side()
    side.open()
    ((_, first),) = side.begin([1, 2, 3])
    ((_, second),) = side.begin([1, 2, 9], epoch=1)
    assert (second.base, second.retained, second.tokens) == (0, 0, [1, 2, 9])
    side.answer(first.number, 4, root=3)
    side.answer(second.number, 4, root=9, epoch=0)
    assert side.take() is None
    side.answer(second.number, 4, root=9, epoch=1)
    side.begin([], retained=3, epoch=1)
    assert side.take() == (9, 4)


def test_parameters_that_no_drafter_needs_are_not_sent():
    side = Side()
    side.open()
    grammar = Grammar(kind="regex", text="a*")
    params = SamplingParams(temperature=0.0, stop=("secret",), grammar=grammar, logprobs=3, n=2)
    ((_, delta),) = side.begin([1], params=params)
    assert delta.params == GREEDY


def test_sequences_beyond_the_draft_models_context_are_not_sent():
    side = Side()
    side.open()
    assert side.begin([1] * 97) == []
    assert len(side.begin([1] * 96, id=2)) == 1


def test_a_silent_service_is_left_and_used_again_when_it_answers():
    side = Side()
    side.open()
    side.begin([1, 2, 3])
    side.now += SILENCE_SECONDS + 1
    (hello,) = side.client.tick(side.now)
    assert isinstance(hello.message, Hello)
    assert side.begin([4], retained=3) == []
    side.client.heard(0, welcome(hello.message.nonce, 50), side.now)
    ((_, delta),) = side.begin([5], retained=4)
    assert (delta.base, delta.tokens) == (0, [1, 2, 3, 4, 5])


def test_an_absent_service_is_logged_once_and_again_when_it_answers(caplog):
    side = Side()
    with caplog.at_level(logging.WARNING):
        sent = []
        for _ in range(50):  # 5 seconds
            sent += [type(out.message) for out in side.client.tick(side.now)]
            if side.now < 0.95:
                assert not caplog.text
            side.now += 0.1
    assert 4 <= sent.count(Hello) <= 6
    assert [record.message for record in caplog.records] == [
        "the draft service at tcp://host0:1 does not answer: continuing without it until it answers"
    ]
    side.now += 1.0
    side.open()
    assert caplog.records[-1].message == "the draft service at tcp://host0:1 answers again"
    side.begin([1, 2, 3])
    side.now += SILENCE_SECONDS + 1
    for _ in range(30):
        side.client.tick(side.now)
        side.now += 0.1
    assert "stopped answering" in caplog.records[-1].message
    assert len(caplog.records) == 3, "once"


def test_the_end_of_a_service_is_logged_once_and_so_is_its_return(caplog):
    side = Side()
    side.open()
    for _ in range(30):
        side.client.unreachable(0, side.now)
        side.client.tick(side.now)
        side.now += 0.1
    side.open()
    assert [record.message for record in caplog.records] == [
        "the draft service at tcp://host0:1 is gone: continuing without it until it answers",
        "the draft service at tcp://host0:1 answers again",
    ]


def test_a_service_that_is_not_reached_yet_is_retried_soon():
    side = Side()
    side.client.tick(0.0)
    side.client.unreachable(0, 0.0)
    assert side.client.tick(0.05) == []
    (hello,) = side.client.tick(RESEND_SECONDS)
    assert isinstance(hello.message, Hello)


def test_sequences_are_synced_again_to_a_restarted_service():
    side = Side()
    side.open()
    ((_, first),) = side.begin([1, 2, 3])
    side.answer(first.number, 4, root=3)
    side.client.heard(0, Unknown(side.client.links[0].tag), side.now)
    side.open()
    ((_, delta),) = side.begin([9], retained=3)
    assert (delta.base, delta.tokens) == (0, [1, 2, 3, 9])


def test_a_busy_reply_delays_the_next_request():
    side = Side()
    side.open()
    side.client.heard(0, Busy(0, side.client.links[0].tag, 2.0), side.now)
    assert side.begin([1]) == []
    side.now = 1.9
    side.client.tick(side.now)
    assert side.begin([2], retained=1) == []
    side.now = 2.1
    side.client.tick(side.now)
    assert len(side.begin([3], retained=2)) == 1


def test_a_refusal_is_logged_and_the_hello_not_repeated_soon(caplog):
    side = Side()
    (hello,) = side.client.tick(0.0)
    with caplog.at_level(logging.ERROR):
        side.client.heard(0, Refused(hello.message.nonce, "tokenizer", "another one"), 0.0)
    assert "tokenizer: another one" in caplog.text
    assert side.client.tick(20.0) == []
    assert isinstance(side.client.tick(40.0)[0].message, Hello)


def test_other_draft_models_than_those_allowed_are_not_used():
    side = Side(models=["right"])
    (hello,) = side.client.tick(0.0)
    side.client.heard(0, welcome(hello.message.nonce, 1, "wrong"), 0.0)
    assert side.begin([1]) == []
    (hello,) = side.client.tick(40.0)
    side.client.heard(0, welcome(hello.message.nonce, 1, "right"), 40.0)
    assert len(side.begin([2], retained=1)) == 1


def pings(side: Side, queues: dict[int, float]) -> list[tuple[int, list[int]]]:
    """Answer Pings for a second, reporting these queues; return the sequences that services are told to
    forget."""
    released = []
    side.now += 1.0
    for out in side.client.tick(side.now):
        if isinstance(out.message, DraftRequests):
            released.append((out.link, out.message.released))
        if isinstance(out.message, Ping):
            tag = side.client.links[out.link].tag
            side.client.heard(out.link, Pong(tag, side.now, queues[out.link], 0.01, 1), side.now)
    return released


def test_a_sequence_moves_when_its_service_fails_or_another_is_clearly_better():
    side = Side(links=2)
    side.open()
    ((first, _),) = side.begin([1, 2])
    other = 1 - first
    released, requests = [], []
    for turn in range(9):
        requests += side.begin([3], retained=2 + turn)
        released += pings(side, {first: 0.5, other: 0.0})
    links = [link for link, _ in requests]
    moved = links.index(other)
    assert links == [first] * moved + [other] * (len(links) - moved), "once"
    assert (requests[moved][1].base, requests[moved][1].retained) == (0, 0)
    assert side.client.placement.moves == 1
    assert released == [(first, [1])], "the abandoned service is told to forget the sequence"
    side.client.unreachable(other, side.now)
    ((link, delta),) = side.begin([4], retained=11)
    assert (link, delta.base) == (first, 0)
    assert side.client.placement.moves == 1, "the sequence did not move to a better service"


def test_a_sequence_does_not_move_to_a_service_that_is_hardly_better():
    side = Side(links=2)
    side.open()
    ((first, _),) = side.begin([1, 2])
    for turn in range(20):
        side.begin([3], retained=2 + turn)
        pings(side, {first: 0.5, 1 - first: 0.45})
    assert side.client.sequences.by_id[1].service == first


def test_a_sequence_goes_to_a_service_whose_context_is_long_enough():
    side = Side(links=2)
    for out in side.client.tick(side.now):
        welcome_of = welcome(out.message.nonce, 1 + out.link)
        if out.link == 1:
            welcome_of = msgspec.structs.replace(welcome_of, max_model_len=400)
        side.client.heard(out.link, welcome_of, side.now)
    assert [link for link, _ in side.begin([1] * 200)] == [1]
    short = {side.begin([1] * 9, id=id)[0][0] for id in range(2, 6)}
    assert short == {0, 1}


def test_released_sequences_are_forgotten_by_their_service_alone():
    side = Side(links=2)
    side.open()
    links = {id: side.begin([1, 2], id=id)[0][0] for id in range(1, 5)}
    assert sorted(links.values()) == [0, 0, 1, 1], "equal services share the sequences"
    side.client.sequences.release([1, 2, 3, 4])
    side.begin([1], id=5)
    side.now += 1.0
    told = {
        (out.link, id)
        for out in side.client.tick(side.now)
        if isinstance(out.message, DraftRequests)
        for id in out.message.released
    }
    idle = 1 - side.client.sequences.by_id[5].service
    assert told == {(idle, id) for id, link in links.items() if link == idle}
