"""A draft service handles each message of its targets as the protocol says."""

import pytest

from streamserve.draft_service.server.admission import FAILED_SECONDS, LONGEST_SECONDS, Limits
from streamserve.draft_service.server.rate_limits import NOTIFY_SECONDS
from streamserve.draft_service.server.session_table import RECONNECT_SECONDS
from streamserve.draft_service.server.types import DraftBatch
from streamserve.protocol.drafting import Busy, Bye, Drafts, Lost, Ping, Pong, Refused, Unknown, Welcome
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from tests.draft_service.service_client import ServiceClient
from tests.draft_service.star import VOCAB, chain


def trees(outs):
    return [draft for out in outs if isinstance(out.message, Drafts) for draft in out.message.drafts]


def test_a_request_is_answered_with_the_tree_after_its_tokens():
    client = ServiceClient()
    assert client.request("a", client.delta("a", [1, 2, 3])) == []
    (draft,) = trees(client.draft_outputs())
    assert draft.tree.tokens == chain([1, 2, 3], 4).tokens
    client.request("a", client.delta("a", [9, 8], retained=3))
    (draft,) = trees(client.draft_outputs())
    assert draft.tree.tokens == chain([1, 2, 3, 9, 8], 4).tokens
    assert client.draft_outputs() == []


def test_a_repeated_delta_gets_the_same_answer_and_is_not_drafted_for_again():
    client = ServiceClient()
    delta = client.delta("a", [1, 2, 3])
    client.request("a", delta)
    assert client.request("a", delta) == [], "the sequence is being drafted for"
    first = trees(client.draft_outputs())
    assert trees(client.request("a", delta)) == first
    assert client.draft_outputs() == []


def test_an_older_delta_that_comes_late_changes_nothing():
    client = ServiceClient()
    old, new = client.delta("a", [1, 2]), client.delta("a", [1, 2, 3])
    client.request("a", new)
    client.request("a", old)
    (draft,) = trees(client.draft_outputs())
    assert draft.number == new.number
    assert draft.tree.tokens == chain([1, 2, 3], 4).tokens


def test_a_delta_that_builds_on_a_lost_one_is_answered_with_lost():
    client = ServiceClient()
    client.request("a", client.delta("a", [1, 2]))
    client.draft_batch()
    client.delta("a", [3], retained=2)  # this message never arrives
    (out,) = client.request("a", client.delta("a", [4], retained=3))
    assert out.message == Lost(client.welcomes["a"].tag, [1])
    assert client.draft_outputs() == []


def test_an_edit_retains_the_kv_of_the_unchanged_prefix():
    client = ServiceClient()
    client.request("a", client.delta("a", list(range(40))))
    client.draft_batch()
    client.request("a", client.delta("a", [*range(30), 7, 7], epoch=1))
    batch = client.service.loop.batch(client.now)
    assert batch.requests[0].computed == 30
    assert batch.requests[0].tokens[: batch.requests[0].length] == [*range(30), 7, 7]


def test_sessions_with_the_same_prompt_share_nothing():
    client = ServiceClient(max_batch=1)
    for name in ("a", "b"):
        client.request(name, client.delta(name, list(range(48))))
    first, second = client.service.sessions.values()
    client.draft_batch()
    client.draft_batch()
    one, other = first.sequences[1], second.sequences[1]
    assert one.blocks
    assert not set(one.blocks) & set(other.blocks)
    assert one.id != other.id
    assert first.channel != second.channel
    client.request("a", released=[1])
    assert other.computed == 48


def test_a_wrong_channel_key_or_tag_is_refused():
    client = ServiceClient()
    client.hello("a", key="one")
    client.hello("b", key="two")
    a, b = client.welcomes["a"], client.welcomes["b"]
    for tag, channel, key in ((a.tag, b.channel, "one"), (a.tag, a.channel, "two"), (a.tag, b"", "one")):
        (out,) = client.service.heard(b"x", Ping(tag, channel, 0.0), 1.0, key)
        assert isinstance(out.message, Refused)
        (out,) = client.service.heard(b"x", Bye(tag, channel), 1.0, key)
        assert isinstance(out.message, Refused)
    (out,) = client.service.heard(b"x", Ping(a.tag + b.tag, b"", 0.0), 1.0)
    assert isinstance(out.message, Unknown)
    (out,) = client.service.heard(b"a", Ping(a.tag, a.channel, 0.5), 1.0, "one")
    assert isinstance(out.message, Pong)
    assert set(client.service.sessions) == {a.tag, b.tag}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"version": 2}, "version"), ({"tokenizer": "x"}, "tokenizer"), ({"vocabulary": "x"}, "vocabulary")],
)
def test_incompatible_targets_are_refused(fields, reason):
    client = ServiceClient()
    out = client.hello("a", **fields)
    assert isinstance(out.message, Refused)
    assert (out.message.reason, out.message.nonce) == (reason, 7)
    assert not client.service.sessions
    assert client.service.statistics.counters.refused == {reason: 1}


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [VOCAB]},
        {"tokens": [-1]},
        {"tokens": []},
        {"retained": -1},
        {"depth": 1000},
        {"nodes": 1 << 40},
        {"width": -1},
        {"expansion": (1,)},
        {"expansion": (0,) * 4},
        {"number": 1 << 63},
        {"choice": 1000},
        {"output": 5},
        {"params": SamplingParams()},
        {"params": SamplingParams(stop_token_ids=(1 << 20,))},
        {"params": SamplingParams(temperature=0.0, grammar=Grammar(kind="regex", text="a*"))},
    ],
)
def test_invalid_deltas_are_refused_and_change_nothing(fields):
    client = ServiceClient()
    client.request("b", client.delta("b", [1, 2]))
    defaults = {"tokens": [1], **fields}
    (out,) = client.request("a", client.delta("a", **defaults))
    assert isinstance(out.message, Refused)
    assert client.draft_batch() == ["b"]
    assert client.service.memory.pool.size - client.service.memory.pool.free == 1


def test_kv_of_the_least_recently_used_sequence_is_evicted_and_rebuilt():
    client = ServiceClient(num_blocks=9, max_batch=1)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        client.request(name, client.delta(name, [token] * 40))
        client.draft_batch()
    a, b, c = (session.sequences[1] for session in client.service.sessions.values())
    assert (len(a.blocks), len(b.blocks), len(c.blocks)) == (3, 3, 3)
    client.request("d", client.delta("d", [4] * 20))
    client.draft_batch()
    assert not a.blocks, "the oldest is evicted"
    assert len(b.blocks) == len(c.blocks) == 3
    client.request("a", client.delta("a", [5], retained=40))
    (draft,) = trees(client.draft_outputs())
    assert draft.tree.tokens == chain([1] * 40 + [5], 4).tokens
    assert client.service.sequence_store.rebuilt == 1
    assert client.service.memory.evictions == 2


def test_long_prompts_are_read_in_pieces_that_others_need_not_wait_for():
    client = ServiceClient(max_read=16, max_batch=1)
    client.request("long", client.delta("long", [1] * 100))
    assert client.draft_batch() == []
    client.request("short", client.delta("short", [2]))
    batches = [client.draft_batch() for _ in range(8)]
    order = [name for names in batches for name in names]
    assert order == ["short", "long"]
    assert batches.index(["short"]) <= 1


def test_sequences_beyond_the_models_context_are_answered_without_a_tree():
    client = ServiceClient(num_blocks=4)
    (draft,) = trees(client.request("a", client.delta("a", [1] * 62)))
    assert draft.tree is None
    assert client.draft_outputs() == []


def test_a_session_ends_with_its_lease_and_leaks_nothing():
    client = ServiceClient(lease=2.0)
    client.request("a", client.delta("a", [1] * 20))
    client.draft_batch()
    client.service.tick(1.9)
    assert client.service.sessions
    client.service.tick(2.1)
    assert not client.service.sessions
    assert client.service.memory.pool.free == 100
    assert client.service.loop.take_released() == [1]
    (out,) = client.request("a", client.delta("a", [1], retained=20))
    assert isinstance(out.message, Unknown)


def test_a_target_that_disconnects_during_its_batch_leaks_nothing():
    client = ServiceClient()
    client.request("a", client.delta("a", [1] * 20))
    batch = client.service.loop.batch(0.0)
    welcome = client.welcomes["a"]
    client.service.heard(b"a", Bye(welcome.tag, welcome.channel), 0.0)
    assert client.service.memory.pool.free < 100, "the sequence's blocks are being written"
    assert client.service.loop.drafted(batch, client.drafter.draft(batch), 0.1) == []
    assert client.service.memory.pool.free == 100


def test_a_batch_that_fails_loses_only_its_trees():
    client = ServiceClient()
    for name in ("a", "b"):
        client.request(name, client.delta(name, [1, 2, 3]))
    batch = client.service.loop.batch(0.0)
    assert len(batch.members) == 2
    assert client.service.loop.failed(batch, 0.1) == []
    assert client.service.memory.pool.free == 100
    client.now = 0.1
    fault = client.service.loop.batch(client.now)
    assert [session.name for session, _ in fault.members] == ["a"], "each sequence is drafted for alone"
    (busy,) = client.service.loop.failed(fault, client.now)
    tag = client.welcomes["a"].tag
    assert (busy.peer, busy.message) == (b"a", Busy(0, tag, FAILED_SECONDS, "drafting"))
    (draft,) = trees(client.draft_outputs())
    assert draft.tree.tokens == chain([1, 2, 3], 4).tokens, "the other is drafted for"
    assert client.draft_outputs() == []
    (busy,) = client.request("a", client.delta("a", [4], retained=3))
    assert busy.message.reason == "drafting"
    client.now += FAILED_SECONDS
    client.request("a", client.delta("a", [1, 2, 3, 4]))
    (draft,) = trees(client.draft_outputs())
    assert draft.tree.tokens == chain([1, 2, 3, 4], 4).tokens


def test_a_session_whose_batches_fail_is_drafted_for_less_and_less():
    client = ServiceClient()
    waits = []
    for _ in range(12):
        client.request("a", client.delta("a", [1, 2, 3]))
        (busy,) = client.service.loop.failed(client.service.loop.batch(client.now), client.now)
        waits.append(busy.message.retry)
        client.now += busy.message.retry
    assert waits[:3] == [FAILED_SECONDS, 2 * FAILED_SECONDS, 4 * FAILED_SECONDS]
    assert waits[-1] == LONGEST_SECONDS
    client.request("a", client.delta("a", [1, 2, 3]))
    assert trees(client.draft_outputs())
    client.request("a", client.delta("a", [1, 2, 3]))
    (busy,) = client.service.loop.failed(client.service.loop.batch(client.now), client.now)
    assert busy.message.retry == FAILED_SECONDS, "the sequence has been drafted for since"


def test_messages_beyond_the_rate_get_a_retry_time():
    client = ServiceClient(limits=Limits(rate=10.0, burst=3.0))
    client.hello("a")
    answers = [client.request("a", client.delta("a", [1, 2])) for _ in range(5)]
    assert [bool(answer) for answer in answers] == [False, False, False, True, False], "answered once"
    assert answers[-2][0].message == Busy(0, 0, NOTIFY_SECONDS, "rate")
    assert client.service.statistics.counters.refused == {"rate": 2}
    client.now += 1.0
    assert client.request("a", client.delta("a", [1, 2])) == []


def test_beyond_the_limit_of_sessions_a_hello_gets_a_retry_time():
    client = ServiceClient(limits=Limits(max_sessions=2, retry=3.0))
    assert isinstance(client.hello("a").message, Welcome)
    assert isinstance(client.hello("b").message, Welcome)
    assert client.hello("c").message == Busy(7, 0, 3.0, "sessions")
    client.service.tick(100.0)
    assert isinstance(client.hello("c").message, Welcome)


def test_a_session_ends_soon_after_its_connection_unless_it_is_heard_again():
    client = ServiceClient(lease=30.0)
    for name in ("dead", "moved"):
        client.request(name, client.delta(name, [1] * 20))
        client.draft_batch()
        client.service.table.disconnected(name.encode(), client.now)
    welcome = client.welcomes["moved"]
    client.now += RECONNECT_SECONDS - 1.0
    (out,) = client.service.heard(b"elsewhere", Ping(welcome.tag, welcome.channel, 0.0), client.now)
    assert (out.peer, type(out.message)) == (b"elsewhere", Pong)
    client.service.tick(client.now)
    assert len(client.service.sessions) == 2
    # a message on the old connection that arrives late
    client.service.table.disconnected(b"moved", client.now)
    client.now += 2.0
    client.service.tick(client.now)
    assert set(client.service.sessions) == {welcome.tag}
    client.service.table.disconnected(b"elsewhere", client.now)
    client.now += RECONNECT_SECONDS + 1.0
    client.service.tick(client.now)
    assert not client.service.sessions
    assert client.service.memory.pool.free == 100


def test_a_dummy_pass_allocates_a_block_and_releases_it():
    client = ServiceClient(num_blocks=2, keep_warm="always")
    assert client.service.loop.warm_up(0.0) is None, "no request has come"
    client.request("a", client.delta("a", [1, 2]))
    client.draft_batch()
    assert client.service.loop.warm_up(client.now) is None, "the draft model is warm"
    assert 0.0 < client.service.loop.pause(client.now) < 0.1
    client.now += client.service.loop.pause(client.now)
    dummy_pass = client.service.loop.warm_up(client.now)
    assert dummy_pass is not None
    assert set(client.drafter.draft(DraftBatch([dummy_pass], [], [], {}, client.now))) == {dummy_pass.id}
    assert not set(dummy_pass.blocks) & set(next(iter(client.service.sessions.values())).sequences[1].blocks)
    client.service.loop.warmed(dummy_pass, client.now)
    assert client.service.memory.pool.free == 1
    assert client.service.loop.take_released() == [dummy_pass.id]
    client.request("a", client.delta("a", [1] * 20, retained=2))
    client.draft_batch()
    client.now += 0.1
    assert client.service.memory.pool.free == 0
    assert client.service.loop.warm_up(client.now) is None, "the memory belongs to other clients"
    assert client.service.loop.pause(client.now) > 0.0


def test_any_sequence_of_a_target_may_evict_the_least_recently_used():
    client = ServiceClient(num_blocks=6)
    client.request("old", *(client.delta("old", [1] * 20, sequence=number) for number in range(3)))
    assert len(trees(client.draft_outputs())) == 3
    client.request("new", *(client.delta("new", [2] * 20, sequence=number) for number in range(3)))
    assert len(trees(client.draft_outputs())) == 3
    assert client.service.memory.evictions == 3
