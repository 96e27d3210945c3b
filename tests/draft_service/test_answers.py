"""A target validates every tree: wrong answers are dropped, counted, and lead to probation."""

import logging
import math

import msgspec
import pytest

from streamserve.draft_service.target.answers import (
    FIRST_PROBATION,
    LONGEST_PROBATION,
    LOST_IN_A_ROW,
    STRIKE_SECONDS,
    STRIKES,
    validated_tree,
)
from streamserve.protocol.drafting import (
    Busy,
    Delta,
    Draft,
    Drafts,
    Hello,
    Lost,
    Ping,
    Pong,
    Refused,
    Tree,
    Unknown,
    printable,
)
from tests.draft_service.client_side import Side, welcome

NAN, INF = math.nan, math.inf
GOOD = Tree((3, 4, 5, 6), (-1, 0, 0, 1), (1.0, 0.9, 0.5, 0.9), (1.0, 0.9, 0.5, 0.8))
ASKED = Delta(1, 0, 1, 0, 0, [1, 2, 3], 0, 0, 4, 2, 4)
WRONG = {
    "a token beyond the vocabulary": {"tokens": (3, 4, 5, 100)},
    "a huge token": {"tokens": (3, 4, 5, (1 << 64) - 1)},
    "a negative token": {"tokens": (3, 4, -1, 6)},
    "another root": {"tokens": (2, 4, 5, 6)},
    "no node": {"tokens": (), "parents": (), "scores": (), "accept": ()},
    "arrays of other lengths": {"scores": (1.0, 0.9)},
    "no parents": {"parents": ()},
    "a parent after its child": {"parents": (-1, 0, 3, 1)},
    "its own parent": {"parents": (-1, 0, 2, 1)},
    "two roots": {"parents": (-1, -1, 0, 1)},
    "a root with a parent": {"parents": (0, 0, 0, 1)},
    "twice the same child": {"tokens": (3, 4, 4, 6)},
    "a NaN score": {"scores": (1.0, NAN, 0.5, 0.9)},
    "an infinite score": {"scores": (1.0, INF, 0.5, 0.9)},
    "a negative score": {"scores": (1.0, -0.1, 0.5, 0.9)},
    "a score over one": {"scores": (1.0, 1.5, 0.5, 0.9)},
    "a NaN chance": {"accept": (1.0, 0.9, NAN, 0.8)},
    "an infinite chance": {"accept": (INF, INF, 0.5, 0.8)},
    "a negative chance": {"accept": (1.0, 0.9, -INF, 0.8)},
    "a chance above the parent's": {"accept": (1.0, 0.5, 0.5, 0.8)},
    "too many nodes": {
        "tokens": (3, 4, 5, 6, 7, 8), "parents": (-1, 0, 0, 0, 0, 0), "scores": (0.5,) * 6,
        "accept": (0.5,) * 6,
    },
}  # fmt: skip


def wrong_tree(name: str) -> Tree:
    return msgspec.structs.replace(GOOD, **WRONG[name])


def test_a_requested_tree_is_accepted_with_its_scores_within_bounds() -> None:
    rounded = msgspec.structs.replace(GOOD, scores=(1.0, 1.0000001, 0.5, 0.9))
    found = validated_tree(rounded, 3, ASKED, 100)
    assert found.tokens == GOOD.tokens
    assert max(found.scores) == 1.0


@pytest.mark.parametrize("name", WRONG)
def test_other_trees_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        validated_tree(wrong_tree(name), 3, ASKED, 100)


def test_a_tree_deeper_than_requested_is_rejected() -> None:
    with pytest.raises(ValueError, match="levels"):
        validated_tree(GOOD, 3, msgspec.structs.replace(ASKED, depth=1), 100)


def answer(side: Side, draft: Draft, **fields: float) -> None:
    defaults = {"waited": 0.0, "seconds": 0.01, "queue": 0.0, **fields}
    side.client.heard(0, Drafts(tag=side.client.links[0].tag, drafts=[draft], **defaults), side.now)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tree_is_dropped_and_counted_and_the_next_valid_one_used(name: str) -> None:
    side = Side()
    side.open()
    ((_, delta),) = side.begin([1, 2, 3], depth=4)
    answer(side, Draft(1, 0, delta.number, wrong_tree(name)))
    assert side.take() is None
    assert side.client.rejected == {"tree": 1}
    ((_, delta),) = side.begin([7], retained=3)
    side.answer(delta.number, 8, root=7)
    assert side.take() == (7, 8)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("timing", Drafts(tag=1, drafts=[], waited=NAN, seconds=0.0, queue=0.0)),
        ("timing", Drafts(tag=1, drafts=[], waited=0.0, seconds=-1.0, queue=0.0)),
        ("timing", Drafts(tag=1, drafts=[], waited=0.0, seconds=0.0, queue=INF)),
        ("timing", Drafts(tag=1, drafts=[], waited=0.0, seconds=1e9, queue=0.0)),
        ("timing", Pong(1, 0.0, NAN, 0.0, 0)),
        ("timing", Pong(1, NAN, 0.0, 0.0, 0)),
        ("timing", Pong(1, 0.0, 0.0, 0.0, -4)),
        ("timing", Busy(0, 1, NAN)),
        ("timing", Busy(0, 1, -INF)),
        ("foreign", Pong(1, -1e9, 0.0, 0.0, 1)),
        ("foreign", Drafts(tag=1, drafts=[Draft(1, 0, 99, None)], waited=0.0, seconds=0.0, queue=0.0)),
        ("foreign", Drafts(tag=1, drafts=[Draft(1, 7, 1, None)], waited=0.0, seconds=0.0, queue=0.0)),
    ],
)  # fmt: skip
def test_impossible_answers_are_dropped_and_counted(fault: str, message) -> None:
    side = Side()
    side.open()
    ((_, delta),) = side.begin([1, 2, 3])
    side.client.heard(0, message, side.now)
    assert side.client.rejected == {fault: 1}
    link = side.client.links[0]
    assert link.usable(side.now)
    assert math.isfinite(link.times.queue + link.times.round_trip + link.times.batch.seconds)
    side.answer(delta.number, 4, root=3)
    assert side.take() == (3, 4)


def test_answers_that_come_late_or_twice_are_dropped_and_are_no_fault() -> None:
    side = Side()
    side.open()
    ((_, first),) = side.begin([1, 2, 3])
    side.answer(first.number, 4, root=3)
    side.answer(first.number, 4, root=3)
    side.client.sequences.release([1])
    side.answer(first.number, 4, root=3)
    answer(side, Draft(77, 0, 1, GOOD))
    side.client.heard(0, Lost(side.client.links[0].tag, [1, 2, 99]), side.now)
    assert side.client.rejected == {}


def send_wrong_answer(side: Side) -> None:
    """Send an answer with a wrong tree."""
    answer(side, Draft(1, 0, 1 << 40, None))


def test_several_wrong_answers_put_a_service_on_probation(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    side.open()
    ((_, delta),) = side.begin([1, 2, 3])
    with caplog.at_level(logging.WARNING):
        for _ in range(STRIKES):
            send_wrong_answer(side)
        side.client.heard(0, Refused(0, "size", "\n" * 5000), side.now)
    link = side.client.links[0]
    assert link.on_probation(side.now)
    assert not link.open
    assert side.client.placement.measured({}, side.now) == []
    assert side.begin([4], retained=3) == [], "nothing is requested from a service on probation"
    side.answer(delta.number, 4, root=3)
    assert side.take() is None, "its answers are ignored"
    (line,) = (record.getMessage() for record in caplog.records)
    assert "sent a wrong answer (foreign" in line
    side.now = FIRST_PROBATION - 0.1
    assert side.client.tick(side.now) == []
    side.now = FIRST_PROBATION + 0.1
    (hello,) = side.client.tick(side.now)
    assert isinstance(hello.message, Hello)
    side.client.heard(0, welcome(hello.message.nonce, 9), side.now)
    ((_, delta),) = side.begin([5], retained=4)
    assert delta.tokens == [1, 2, 3, 4, 5], "the whole sequence is synced again"
    side.answer(delta.number, 6, root=5)
    assert side.take() == (5, 6)


def test_probation_grows_longer_each_time_and_has_an_end() -> None:
    side, waits = Side(), []
    for _ in range(10):
        side.open()
        side.begin([1, 2, 3])
        for _ in range(STRIKES):
            send_wrong_answer(side)
        link = side.client.links[0]
        waits.append(round(link.reputation.until - side.now, 6))
        side.now = link.reputation.until + 0.01
        side.client.sequences.release([1])
    assert waits[:3] == [FIRST_PROBATION, 2 * FIRST_PROBATION, 4 * FIRST_PROBATION]
    assert waits[-1] == LONGEST_PROBATION
    assert side.client.links[0].reputation.probations == 10


def test_rare_wrong_answers_do_not_lead_to_probation() -> None:
    side = Side()
    side.open()
    for _ in range(20):
        side.begin([1, 2, 3])
        send_wrong_answer(side)
        side.now += STRIKE_SECONDS / 2 + 1
        side.client.links[0].unanswered = None
    assert not side.client.links[0].on_probation(side.now)
    assert side.client.rejected == {"foreign": 20}


def test_another_service_is_used_while_one_is_on_probation() -> None:
    side = Side(links=2)
    side.open()
    ((first, _),) = side.begin([1, 2, 3])
    tag = side.client.links[first].tag
    for _ in range(STRIKES):
        foreign = Drafts(tag=tag, drafts=[Draft(1, 0, 99, None)], waited=0.0, seconds=0.0, queue=0.0)
        side.client.heard(first, foreign, side.now)
    ((link, delta),) = side.begin([4], retained=3)
    assert (link, delta.tokens) == (1 - first, [1, 2, 3, 4])


def test_a_sequence_that_is_lost_repeatedly_is_not_synced_forever() -> None:
    side = Side()
    side.open()
    tokens, synced = [1, 2, 3], 0
    for step in range(200):
        synced += sum(len(delta.tokens) for _, delta in side.begin(tokens, retained=3 if step else 0))
        tokens = []
        side.client.heard(0, Lost(side.client.links[0].tag, [1]), side.now)
    assert side.client.rejected == {"lost": STRIKES}
    assert synced == 3 * STRIKES * (LOST_IN_A_ROW + 1)
    assert side.client.links[0].on_probation(side.now)


def test_a_session_that_ends_without_a_tree_is_not_reopened_at_once() -> None:
    side, hellos = Side(), 0
    for _ in range(100):
        for out in side.client.tick(side.now):
            if isinstance(out.message, Hello):
                hellos += 1
                side.client.heard(0, welcome(out.message.nonce, hellos), side.now)
        side.client.heard(0, Unknown(side.client.links[0].tag), side.now)
        side.now += 0.01
    assert hellos <= 2


def test_a_flood_is_not_even_decoded() -> None:
    side = Side()
    side.open()
    read = sum(side.client.size(0, 100, side.now) for _ in range(100_000))
    assert read <= 20_000
    assert side.client.rejected == {"flood": 1}
    assert side.client.links[0].on_probation(side.now), "the service is put on probation at once"


def test_refusals_are_logged_once_and_truncated(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    with caplog.at_level(logging.ERROR):
        for _ in range(50):
            side.client.heard(0, Refused(0, "size", "x\x1b[2J\n" * 800), side.now)
            side.now += 0.1
    (line,) = (record.getMessage() for record in caplog.records)
    assert len(line) < 400
    assert line.isprintable()


def test_pings_of_this_session_are_answered() -> None:
    side = Side()
    side.open()
    for _ in range(30):
        side.now += 1.0
        for out in side.client.tick(side.now):
            if isinstance(out.message, Ping):
                pong = Pong(side.client.links[0].tag, out.message.sent, 0.0, 0.0, 1)
                side.client.heard(0, pong, side.now)
                side.client.heard(0, pong, side.now)  # the network duplicates the message
    assert side.client.rejected == {}


def test_busy_without_a_tag_is_about_the_session_that_is_open() -> None:
    side = Side()
    side.open()
    side.client.heard(0, Busy(0, 0, 2.0, "bytes"), side.now)
    assert side.begin([1]) == []
    side.now = 2.1
    side.client.tick(side.now)
    assert len(side.begin([2], retained=1)) == 1


def test_untrusted_text_is_logged_in_one_short_line() -> None:
    assert printable("a\nb\x00c" + "é" * 100) == "a?b?c" + "é" * 59
    assert len(printable("\ud800" * 1000)) == 64
