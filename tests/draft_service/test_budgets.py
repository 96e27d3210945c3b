"""What one client of a draft service can make it hold and do, and what others notice of that."""

import random
from collections.abc import Callable

import pytest

from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.intake import RECENT, SOURCES, TELL_SECONDS, Intake
from streamserve.draft_service.server.types import Batch
from streamserve.protocol.drafting import DRAFT_VERSION, Busy, Drafts, Hello, Lost, Welcome
from tests.draft_service.talk import Talk

MIB = 1 << 20


def refused(talk: Talk) -> dict[str, int]:
    return talk.service.statistics.counters.refused


def hello(talk: Talk, name: str, key: str):
    return talk.hello(name, key=key).message


# Before a message is decoded


def test_bytes_are_charged_by_the_size_of_frames():
    intake = Intake(Limits(byte_rate=MIB, byte_burst=4 * MIB))
    for _ in range(4):
        assert intake.charge(b"a", MIB, 0.0) is None
    overdrawn = intake.charge(b"a", MIB, 0.0)
    assert (overdrawn.reason, overdrawn.retry, overdrawn.tell) == ("bytes", 1.0, True)
    assert not intake.charge(b"a", MIB, TELL_SECONDS / 2).tell, "told a moment ago"
    assert intake.charge(b"a", MIB, 1.0) is None
    assert intake.charge(b"b", MIB, 1.0) is None, "another client has its own"


def test_a_message_larger_than_the_burst_does_not_wait_for_ever():
    intake = Intake(Limits(byte_rate=MIB, byte_burst=2 * MIB))
    assert intake.charge(b"a", 8 * MIB, 0.0) is None
    assert intake.charge(b"a", 1, 1.0).reason == "bytes"


@pytest.mark.parametrize("greedy", [1, 20])
def test_of_the_total_each_client_has_its_part(greedy):
    """However much others send, one below an equal part of the total is always read."""
    intake = Intake(Limits(byte_rate=4.0 * MIB, byte_burst=4.0 * MIB, total_byte_rate=8.0 * MIB))
    read = dict.fromkeys(range(greedy), 0)
    small = turned_away = 0
    for step in range(4000):
        now = step / 1000
        for name in range(greedy):
            if intake.charge(str(name).encode(), MIB // 64, now) is None:
                read[name] += MIB // 64
        if step % 10 == 0:
            small += 1
            turned_away += intake.charge(b"small", 2048, now) is not None
    assert turned_away == 0
    assert small == 400
    bursts = 8.0 * MIB + greedy * MIB  # of the total, and of each client's part
    assert sum(read.values()) <= 4 * 8.0 * MIB + 4 * bursts
    assert sum(read.values()) >= 4 * min(8.0, 4.0 * greedy) * MIB * 0.8
    assert min(read.values()) >= 0.2 * max(read.values())


def test_clients_that_come_and_go_are_forgotten():
    intake = Intake(Limits())
    for number in range(3 * SOURCES):
        intake.charge(str(number).encode(), 1, number * RECENT)
    assert len(intake._sources) == SOURCES


def test_who_passes_its_rate_is_told_the_reason_and_when_to_come_back():
    talk = Talk(limits=Limits(byte_rate=1000.0, byte_burst=2000.0))
    hello(talk, "a", "k")
    answers = [out.message for _ in range(40) for out in talk.ask("a", talk.delta("a", [1] * 50))]
    (busy,) = [message for message in answers if isinstance(message, Busy)]
    assert (busy.nonce, busy.tag, busy.reason) == (0, 0, "bytes")
    assert busy.retry >= TELL_SECONDS
    assert refused(talk)["bytes"] > 10


# What is kept


def texts(talk: Talk, name: str) -> int:
    """Sequences that are kept for a target."""
    tag = talk.welcomes[name].tag
    return len(talk.service.sessions[tag].sequences)


def fill(talk: Talk, name: str, count: int, tokens: int = 2000) -> list:
    """Tell many long texts, and take the trees."""
    answers = []
    for sequence in range(1, count + 1):
        answers += talk.ask(name, talk.delta(name, [sequence % 50] * tokens, sequence=sequence, nodes=1))
        while talk.turn_outs():
            pass
    return answers


def test_one_client_fills_the_memory_for_texts_and_loses_only_its_own():
    talk = Talk(num_blocks=400, limits=Limits(held_bytes=4 * MIB))
    for name in ("small", "greedy"):
        hello(talk, name, name)
    fill(talk, "small", 3)
    fill(talk, "greedy", 60)
    held = talk.service.held
    assert held.dropped > 20
    assert held.total <= held.limit
    assert texts(talk, "small") == 3, "another's texts stay"
    (out,) = talk.ask("greedy", talk.delta("greedy", [1], sequence=1, keep=2000, base=1))
    assert isinstance(out.message, Lost), "it tells what was dropped anew"
    assert talk.ask("small", talk.delta("small", [1], sequence=1, keep=2000)) == []


def test_a_new_client_gets_room_from_the_one_that_holds_most():
    talk = Talk(num_blocks=400, limits=Limits(held_bytes=4 * MIB))
    hello(talk, "greedy", "g")
    fill(talk, "greedy", 60)
    hello(talk, "late", "l")
    answers = fill(talk, "late", 5)
    assert not [out for out in answers if isinstance(out.message, Busy)]
    assert texts(talk, "late") == 5


def test_a_text_that_can_never_be_kept_is_refused_by_name():
    talk = Talk(limits=Limits(held_bytes=MIB))
    (out,) = talk.ask("a", talk.delta("a", [1] * 40_000))
    assert (out.message.reason, out.message.retry) == ("memory", 1.0)
    assert talk.service.held.total == 0
    assert refused(talk) == {"memory": 1}


def test_what_is_released_or_closed_is_not_counted_any_more():
    talk = Talk(num_blocks=400, lease=1.0)
    fill(talk, "a", 5)
    fill(talk, "b", 5)
    assert talk.service.held.total > 10 * 2000 * 8
    talk.ask("a", released=[1, 2, 3, 4, 5])
    talk.service.tick(talk.now + 100.0)
    assert talk.service.held.total == 0
    assert talk.service.memory.pool.free == 400
    assert not talk.service.memory._holders


# Sessions, and who is drafted for


def test_a_client_with_all_sessions_gives_one_up_for_another():
    talk = Talk(limits=Limits(max_sessions=4))
    for number in range(4):
        assert isinstance(hello(talk, f"greedy-{number}", "g"), Welcome)
    assert hello(talk, "greedy-4", "g") == Busy(7, 0, 1.0, "sessions")
    for name in ("one", "two", "three"):
        assert isinstance(hello(talk, name, name), Welcome)
    assert hello(talk, "four", "four") == Busy(7, 0, 1.0, "sessions"), "each has one"
    keys = sorted(session.key for session in talk.service.sessions.values())
    assert keys == ["g", "one", "three", "two"]


def test_a_connection_has_one_session():
    talk = Talk()
    first = hello(talk, "a", "k")
    assert hello(talk, "a", "k") == first, "the same Hello twice"
    (out,) = talk.service.heard(b"a", _hello(8), talk.now, "k")
    assert isinstance(out.message, Welcome)
    assert set(talk.service.sessions) == {out.message.tag}
    assert out.message.tag != first.tag


def _hello(nonce: int):
    return Hello(version=DRAFT_VERSION, tokenizer="t", vocabulary="v", name="a", nonce=nonce)


def test_the_first_session_of_each_client_is_drafted_for_before_the_second_of_any():
    talk = Talk(max_batch=1, limits=Limits(max_sessions=8))
    for number in range(6):
        hello(talk, f"greedy-{number}", "g")
        talk.ask(f"greedy-{number}", talk.delta(f"greedy-{number}", [1]))
    two_gain(talk)
    assert isinstance(hello(talk, "small", "s"), Welcome)
    assert talk.ask("small", talk.delta("small", [1, 2])) == []
    (busy,) = talk.ask("greedy-1", talk.delta("greedy-1", [1, 2]))
    assert busy.message.reason == "targets"
    assert talk.ask("greedy-0", talk.delta("greedy-0", [1, 2])) == []
    assert hello(talk, "greedy-7", "g").reason == "targets"


def two_gain(talk: Talk) -> None:
    """Drafting turns out to be so dear that two targets gain by it."""
    statistics = talk.service.statistics
    for _ in range(40):
        statistics.returned(0.04, 0.04, 0.03)
        statistics.drafted(1, 4, 0.04, False)
        statistics.verified(4, 5)
    assert talk.service.most() == 2


@pytest.mark.parametrize(
    ("count", "nodes", "reason"), [(20, 1000, "nodes"), (33, 4, "in-flight"), (4097, 0, "rate")]
)
def test_a_message_that_asks_for_too_much_is_refused_by_name(count, nodes, reason):
    talk = Talk(limits=Limits(in_flight=32))
    deltas = [talk.delta("a", [1], sequence=number, nodes=nodes, depth=0) for number in range(count)]
    (out,) = talk.ask("a", *deltas)
    assert (out.message.reason, out.message.retry) == (reason, 1.0)
    assert not talk.service.sessions[talk.welcomes["a"].tag].sequences, "no work was done for it"
    assert talk.service.batch(0.0) is None


def test_batches_are_bounded_in_nodes_and_rows():
    limits = Limits(batch_nodes=100, batch_rows=500)
    talk = Talk(num_blocks=4000, max_read=64, limits=limits)
    for name in "ab":
        deltas = [talk.delta(name, [1] * 90, sequence=number, nodes=30) for number in range(1, 31)]
        talk.ask(name, *deltas)
    batches, answered = 0, 0
    while (batch := talk.service.batch(talk.now)) is not None:
        batches += 1
        assert sum(request.nodes for request in batch.requests) <= limits.batch_nodes
        assert sum(len(request.new_tokens) for request in batch.requests) <= limits.batch_rows
        talk.now += 0.01
        outs = talk.service.drafted(batch, talk.drafter.draft(batch), talk.now)
        answered += sum(len(out.message.drafts) for out in outs if isinstance(out.message, Drafts))
    assert answered == 60
    assert batches > 20


# One greedy client and a modest one


def latency(talk: Talk, crowd: Callable[[], None], rounds: int = 60) -> list[float]:
    """Seconds in which a modest client, which asks for a tree of four every 30 ms, gets each."""
    hello(talk, "modest", "modest")
    rng, tokens, waits = random.Random(3), 1, []
    talk.ask("modest", talk.delta("modest", [1]))
    asked, due = talk.now, None
    while len(waits) < rounds:
        crowd()
        if due is not None and talk.now >= due:
            new = [rng.randrange(50)]
            assert talk.ask("modest", talk.delta("modest", new, keep=tokens)) == []
            tokens, asked, due = tokens + 1, talk.now, None
        batch = talk.service.batch(talk.now)
        if batch is None:
            talk.now += 0.001
            continue
        talk.now += cost(batch)
        for out in talk.service.drafted(batch, talk.drafter.draft(batch), talk.now):
            if out.peer == b"modest":
                waits.append(talk.now - asked)
                due = talk.now + 0.03
    return waits


def cost(batch: Batch) -> float:
    """A pass takes 1 ms and 20 µs a row."""
    read = sum(request.keep + len(request.new_tokens) - request.computed for request in batch.requests)
    depth = max(request.depth for request in batch.requests)
    nodes = sum(request.nodes for request in batch.requests)
    return 0.001 * max(depth, 1) + 2e-5 * (read + nodes)


class Greedy:
    """A client with as many sessions as it gets, each of which always asks for all that it may."""

    def __init__(self, talk: Talk, sessions: int) -> None:
        self.talk = talk
        self.names = [f"greedy-{number}" for number in range(sessions)]
        self.refused: dict[str, int] = {}
        for name in self.names:
            hello(talk, name, "greedy")

    def __call__(self) -> None:
        for name in self.names:
            if name in self.talk.welcomes:
                session = self.talk.service.sessions.get(self.talk.welcomes[name].tag)
                if session is not None and session.asked is None:
                    self._ask(name)

    def _ask(self, name: str) -> None:
        deltas = [
            self.talk.delta(name, [1] * 200, sequence=number, depth=16, width=8, nodes=64)
            for number in range(1, 31)
        ]
        for out in self.talk.ask(name, *deltas, need=0.0):
            if isinstance(out.message, Busy):
                self.refused[out.message.reason] = self.refused.get(out.message.reason, 0) + 1


def test_a_greedy_client_at_all_its_limits_costs_another_no_more_than_a_batch(record):
    limits = Limits(held_bytes=24 * MIB, in_flight=200, max_sessions=16, batch_nodes=512, byte_rate=1e6)
    alone = latency(Talk(num_blocks=600, max_batch_seconds=0.05, limits=limits), lambda: None)
    talk = Talk(num_blocks=600, max_batch_seconds=0.05, limits=limits)
    greedy = Greedy(talk, 20)
    beside = latency(talk, greedy)
    assert greedy.refused.get("in-flight") or greedy.refused.get("bytes")
    served = [session for session in talk.service.sessions.values() if session.account.key == "greedy"]
    assert sum(session.trees for session in served) > 100, "it was drafted for, too"
    # The longest batch: 16 levels, all nodes, all rows. The modest one waits for the batch at hand and for
    # the one that it is in.
    longest = 0.001 * 16 + 2e-5 * (limits.batch_nodes + limits.batch_rows)
    mean = sum(beside) / len(beside)
    record(alone=sum(alone) / len(alone), beside=mean, worst=max(beside), longest_batch=longest)
    print(f"alone {sum(alone) / len(alone):.4f} s, mean {mean:.4f} s, worst {max(beside):.4f} s")
    assert max(beside) <= 2 * longest
    assert mean <= 0.02 + longest
    assert talk.service.statistics.counters.rebuilt == 0 or not evicted(talk, "modest")


def evicted(talk: Talk, name: str) -> bool:
    """Whether a target's sequence lost its KV."""
    session = talk.service.sessions[talk.welcomes[name].tag]
    return any(not one.blocks for one in session.sequences.values())


def test_more_sessions_get_a_client_no_more_time():
    """Ten sessions of one client and one of another ask all the time: each client gets half."""
    talk = Talk(max_batch=1)
    names = [*(f"many-{number}" for number in range(10)), "one"]
    for name in names:
        hello(talk, name, name.partition("-")[0])
        talk.ask(name, talk.delta(name, [1]))
    served = dict.fromkeys(names, 0)
    for _ in range(400):
        for name in talk.turn():
            served[name] += 1
            talk.ask(name, talk.delta(name, [1, 2]))
    assert abs(served["one"] - 200) <= 5
    assert max(served[name] for name in names[:-1]) <= min(served[name] for name in names[:-1]) + 3


def test_kv_of_a_client_within_its_share_is_not_evicted():
    talk = Talk(num_blocks=60)
    hello(talk, "modest", "m")
    hello(talk, "greedy", "g")
    talk.ask("modest", talk.delta("modest", [1] * 100))
    talk.turn()
    for sequence in range(1, 40):
        talk.ask("greedy", talk.delta("greedy", [2] * 100, sequence=sequence))
        while talk.turn_outs():
            pass
    assert talk.service.memory.evictions > 20
    assert not evicted(talk, "modest")


def test_in_bounded_batches_every_sequence_of_a_session_has_its_turn():
    """Ten sequences, of which three fit into a batch, ask again as soon as they are answered."""
    talk = Talk(num_blocks=400, limits=Limits(batch_nodes=12))
    lengths = dict.fromkeys(range(10), 1)
    for sequence in lengths:
        talk.ask("a", talk.delta("a", [1], sequence=sequence))
    served = dict.fromkeys(lengths, 0)
    for _ in range(100):
        for out in talk.turn_outs():
            for draft in out.message.drafts:
                served[draft.sequence] += 1
                delta = talk.delta("a", [2], sequence=draft.sequence, keep=lengths[draft.sequence])
                lengths[draft.sequence] += 1
                talk.ask("a", delta)
    assert min(served.values()) >= 20, "30 would be equal"
    assert sum(served.values()) == 300
