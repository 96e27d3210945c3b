"""What a draft service does with what its targets say."""

import pytest

from streamserve.draft_service.server.admission import FAILED_SECONDS, LONGEST_SECONDS, Limits
from streamserve.draft_service.server.intake import TELL_SECONDS
from streamserve.draft_service.server.service import GONE_SECONDS
from streamserve.draft_service.server.types import Batch
from streamserve.protocol.drafting import Busy, Bye, Drafts, Lost, Ping, Pong, Refused, Unknown, Welcome
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from tests.draft_service.star import VOCAB, chain
from tests.draft_service.talk import Talk


def trees(outs):
    return [draft for out in outs if isinstance(out.message, Drafts) for draft in out.message.drafts]


def test_a_request_is_answered_with_the_tree_behind_its_tokens():
    talk = Talk()
    assert talk.ask("a", talk.delta("a", [1, 2, 3])) == []
    (draft,) = trees(talk.turn_outs())
    assert draft.tree.tokens == chain([1, 2, 3], 4).tokens
    talk.ask("a", talk.delta("a", [9, 8], keep=3))
    (draft,) = trees(talk.turn_outs())
    assert draft.tree.tokens == chain([1, 2, 3, 9, 8], 4).tokens
    assert talk.turn_outs() == []


def test_a_repeated_delta_gets_the_same_answer_and_is_not_drafted_for_again():
    talk = Talk()
    delta = talk.delta("a", [1, 2, 3])
    talk.ask("a", delta)
    assert talk.ask("a", delta) == [], "it is being seen to"
    first = trees(talk.turn_outs())
    assert trees(talk.ask("a", delta)) == first
    assert talk.turn_outs() == []


def test_an_older_delta_that_comes_late_changes_nothing():
    talk = Talk()
    old, new = talk.delta("a", [1, 2]), talk.delta("a", [1, 2, 3])
    talk.ask("a", new)
    talk.ask("a", old)
    (draft,) = trees(talk.turn_outs())
    assert draft.number == new.number
    assert draft.tree.tokens == chain([1, 2, 3], 4).tokens


def test_a_delta_that_builds_on_a_lost_one_is_called_lost():
    talk = Talk()
    talk.ask("a", talk.delta("a", [1, 2]))
    talk.turn()
    talk.delta("a", [3], keep=2)  # this one never arrives
    (out,) = talk.ask("a", talk.delta("a", [4], keep=3))
    assert out.message == Lost(talk.welcomes["a"].tag, [1])
    assert talk.turn_outs() == []


def test_an_edit_keeps_the_kv_of_what_stayed():
    talk = Talk()
    talk.ask("a", talk.delta("a", list(range(40))))
    talk.turn()
    talk.ask("a", talk.delta("a", [*range(30), 7, 7], epoch=1))
    batch = talk.service.batch(talk.now)
    assert batch.requests[0].computed == 30
    assert batch.requests[0].new_tokens == [*range(30), 7, 7], "the drafter knows nothing of an edited one"


def test_sessions_with_the_same_prompt_share_nothing():
    talk = Talk(max_batch=1)
    for name in ("a", "b"):
        talk.ask(name, talk.delta(name, list(range(48))))
    first, second = talk.service.sessions.values()
    talk.turn()
    talk.turn()
    one, other = first.sequences[1], second.sequences[1]
    assert one.blocks
    assert not set(one.blocks) & set(other.blocks)
    assert one.id != other.id
    assert first.channel != second.channel
    talk.ask("a", released=[1])
    assert other.computed == 48


def test_another_channel_key_or_tag_opens_nothing():
    talk = Talk()
    talk.hello("a", key="one")
    talk.hello("b", key="two")
    a, b = talk.welcomes["a"], talk.welcomes["b"]
    for tag, channel, key in ((a.tag, b.channel, "one"), (a.tag, a.channel, "two"), (a.tag, b"", "one")):
        (out,) = talk.service.heard(b"x", Ping(tag, channel, 0.0), 1.0, key)
        assert isinstance(out.message, Refused)
        (out,) = talk.service.heard(b"x", Bye(tag, channel), 1.0, key)
        assert isinstance(out.message, Refused)
    (out,) = talk.service.heard(b"x", Ping(a.tag + b.tag, b"", 0.0), 1.0)
    assert isinstance(out.message, Unknown)
    (out,) = talk.service.heard(b"a", Ping(a.tag, a.channel, 0.5), 1.0, "one")
    assert isinstance(out.message, Pong)
    assert set(talk.service.sessions) == {a.tag, b.tag}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"version": 2}, "version"), ({"tokenizer": "x"}, "tokenizer"), ({"vocabulary": "x"}, "vocabulary")],
)
def test_who_does_not_fit_is_refused(fields, reason):
    talk = Talk()
    out = talk.hello("a", **fields)
    assert isinstance(out.message, Refused)
    assert (out.message.reason, out.message.nonce) == (reason, 7)
    assert not talk.service.sessions
    assert talk.service.statistics.counters.refused == {reason: 1}


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [VOCAB]},
        {"tokens": [-1]},
        {"tokens": []},
        {"keep": -1},
        {"depth": 1000},
        {"nodes": 1 << 40},
        {"width": -1},
        {"expansion": (1,)},
        {"expansion": (0,) * 4},
        {"number": 1 << 63},
        {"choice": 1000},
        {"output": 5},
        {"hidden": b"x"},
        {"params": SamplingParams()},
        {"params": SamplingParams(temperature=-1.0)},
        {"params": SamplingParams(temperature=0.0, grammar=Grammar(kind="regex", text="a*"))},
    ],
)
def test_what_no_target_would_send_is_refused_and_changes_nothing(fields):
    talk = Talk()
    talk.ask("b", talk.delta("b", [1, 2]))
    given = {"tokens": [1], **fields}
    (out,) = talk.ask("a", talk.delta("a", **given))
    assert isinstance(out.message, Refused)
    assert talk.turn() == ["b"]
    assert talk.service.memory.pool.size - talk.service.memory.pool.free == 1


def test_kv_is_taken_from_who_was_used_longest_ago_and_rebuilt_from_the_prefix():
    talk = Talk(num_blocks=9, max_batch=1)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        talk.ask(name, talk.delta(name, [token] * 40))
        talk.turn()
    a, b, c = (session.sequences[1] for session in talk.service.sessions.values())
    assert (len(a.blocks), len(b.blocks), len(c.blocks)) == (3, 3, 3)
    talk.ask("d", talk.delta("d", [4] * 20))
    talk.turn()
    assert not a.blocks, "the oldest is evicted"
    assert len(b.blocks) == len(c.blocks) == 3
    talk.ask("a", talk.delta("a", [5], keep=40))
    (draft,) = trees(talk.turn_outs())
    assert draft.tree.tokens == chain([1] * 40 + [5], 4).tokens
    assert talk.service.sequence_store.rebuilt == 1
    assert talk.service.memory.evictions == 2


def test_long_prompts_are_read_in_pieces_that_others_need_not_wait_for():
    talk = Talk(max_read=16, max_batch=1)
    talk.ask("long", talk.delta("long", [1] * 100))
    assert talk.turn() == []
    talk.ask("short", talk.delta("short", [2]))
    batcher = [talk.turn() for _ in range(8)]
    order = [name for names in batcher for name in names]
    assert order == ["short", "long"]
    assert batcher.index(["short"]) <= 1


def test_what_is_too_long_for_the_model_is_answered_without_a_tree():
    talk = Talk(num_blocks=4)
    (draft,) = trees(talk.ask("a", talk.delta("a", [1] * 62)))
    assert draft.tree is None
    assert talk.turn_outs() == []


def test_a_session_ends_with_its_lease_and_leaves_nothing():
    talk = Talk(lease=2.0)
    talk.ask("a", talk.delta("a", [1] * 20))
    talk.turn()
    talk.service.tick(1.9)
    assert talk.service.sessions
    talk.service.tick(2.1)
    assert not talk.service.sessions
    assert talk.service.memory.pool.free == 100
    assert talk.service.take_released() == [1]
    (out,) = talk.ask("a", talk.delta("a", [1], keep=20))
    assert isinstance(out.message, Unknown)


def test_a_target_that_leaves_while_it_is_drafted_for_leaves_nothing():
    talk = Talk()
    talk.ask("a", talk.delta("a", [1] * 20))
    batch = talk.service.batch(0.0)
    welcome = talk.welcomes["a"]
    talk.service.heard(b"a", Bye(welcome.tag, welcome.channel), 0.0)
    assert talk.service.memory.pool.free < 100, "its blocks are being written"
    assert talk.service.drafted(batch, talk.drafter.draft(batch), 0.1) == []
    assert talk.service.memory.pool.free == 100


def test_a_batch_that_fails_costs_its_trees_and_nothing_else():
    talk = Talk()
    for name in ("a", "b"):
        talk.ask(name, talk.delta(name, [1, 2, 3]))
    batch = talk.service.batch(0.0)
    assert len(batch.members) == 2
    assert talk.service.failed(batch, 0.1) == []
    assert talk.service.memory.pool.free == 100
    talk.now = 0.1
    fault = talk.service.batch(talk.now)
    assert [session.name for session, _ in fault.members] == ["a"], "each alone"
    (busy,) = talk.service.failed(fault, talk.now)
    tag = talk.welcomes["a"].tag
    assert (busy.peer, busy.message) == (b"a", Busy(0, tag, FAILED_SECONDS, "drafting"))
    (draft,) = trees(talk.turn_outs())
    assert draft.tree.tokens == chain([1, 2, 3], 4).tokens, "the other is drafted for"
    assert talk.turn_outs() == []
    (busy,) = talk.ask("a", talk.delta("a", [4], keep=3))
    assert busy.message.reason == "drafting"
    talk.now += FAILED_SECONDS
    talk.ask("a", talk.delta("a", [1, 2, 3, 4]))
    (draft,) = trees(talk.turn_outs())
    assert draft.tree.tokens == chain([1, 2, 3, 4], 4).tokens


def test_who_fails_again_and_again_is_drafted_for_less_and_less():
    talk = Talk()
    waits = []
    for _ in range(12):
        talk.ask("a", talk.delta("a", [1, 2, 3]))
        (busy,) = talk.service.failed(talk.service.batch(talk.now), talk.now)
        waits.append(busy.message.retry)
        talk.now += busy.message.retry
    assert waits[:3] == [FAILED_SECONDS, 2 * FAILED_SECONDS, 4 * FAILED_SECONDS]
    assert waits[-1] == LONGEST_SECONDS
    talk.ask("a", talk.delta("a", [1, 2, 3]))
    assert trees(talk.turn_outs())
    talk.ask("a", talk.delta("a", [1, 2, 3]))
    (busy,) = talk.service.failed(talk.service.batch(talk.now), talk.now)
    assert busy.message.retry == FAILED_SECONDS, "it has been drafted for since"


def test_messages_beyond_the_rate_are_told_to_come_back():
    talk = Talk(limits=Limits(rate=10.0, burst=3.0))
    talk.hello("a")
    answers = [talk.ask("a", talk.delta("a", [1, 2])) for _ in range(5)]
    assert [bool(answer) for answer in answers] == [False, False, False, True, False], "told once"
    assert answers[-2][0].message == Busy(0, 0, TELL_SECONDS, "rate")
    assert talk.service.statistics.counters.refused == {"rate": 2}
    talk.now += 1.0
    assert talk.ask("a", talk.delta("a", [1, 2])) == []


def test_beyond_the_limit_of_sessions_a_hello_is_told_to_come_back():
    talk = Talk(limits=Limits(max_sessions=2, retry=3.0))
    assert isinstance(talk.hello("a").message, Welcome)
    assert isinstance(talk.hello("b").message, Welcome)
    assert talk.hello("c").message == Busy(7, 0, 3.0, "sessions")
    talk.service.tick(100.0)
    assert isinstance(talk.hello("c").message, Welcome)


def test_a_session_ends_soon_after_its_connection_unless_it_is_heard_again():
    talk = Talk(lease=30.0)
    for name in ("dead", "moved"):
        talk.ask(name, talk.delta(name, [1] * 20))
        talk.turn()
        talk.service.disconnected(name.encode(), talk.now)
    welcome = talk.welcomes["moved"]
    talk.now += GONE_SECONDS - 1.0
    (out,) = talk.service.heard(b"elsewhere", Ping(welcome.tag, welcome.channel, 0.0), talk.now)
    assert (out.peer, type(out.message)) == (b"elsewhere", Pong)
    talk.service.tick(talk.now)
    assert len(talk.service.sessions) == 2
    talk.service.disconnected(b"moved", talk.now)  # the old connection, late
    talk.now += 2.0
    talk.service.tick(talk.now)
    assert set(talk.service.sessions) == {welcome.tag}
    talk.service.disconnected(b"elsewhere", talk.now)
    talk.now += GONE_SECONDS + 1.0
    talk.service.tick(talk.now)
    assert not talk.service.sessions
    assert talk.service.memory.pool.free == 100


def test_a_pass_for_nobody_needs_a_block_and_gives_it_back():
    talk = Talk(num_blocks=2, keep_warm="always")
    assert talk.service.warm_up(0.0) is None, "nobody has come"
    talk.ask("a", talk.delta("a", [1, 2]))
    talk.turn()
    assert talk.service.warm_up(talk.now) is None, "it is warm"
    assert 0.0 < talk.service.pause(talk.now) < 0.1
    talk.now += talk.service.pause(talk.now)
    spare = talk.service.warm_up(talk.now)
    assert spare is not None
    assert set(talk.drafter.draft(Batch([spare], [], [], {}, talk.now))) == {spare.id}
    assert not set(spare.blocks) & set(next(iter(talk.service.sessions.values())).sequences[1].blocks)
    talk.service.warmed(spare, talk.now)
    assert talk.service.memory.pool.free == 1
    assert talk.service.take_released() == [spare.id]
    talk.ask("a", talk.delta("a", [1] * 20, keep=2))
    talk.turn()
    talk.now += 0.1
    assert talk.service.memory.pool.free == 0
    assert talk.service.warm_up(talk.now) is None, "memory is others'"
    assert talk.service.pause(talk.now) > 0.0


def test_every_sequence_of_a_target_may_take_what_was_used_longest_ago():
    talk = Talk(num_blocks=6)
    talk.ask("old", *(talk.delta("old", [1] * 20, sequence=number) for number in range(3)))
    assert len(trees(talk.turn_outs())) == 3
    talk.ask("new", *(talk.delta("new", [2] * 20, sequence=number) for number in range(3)))
    assert len(trees(talk.turn_outs())) == 3
    assert talk.service.memory.evictions == 3
