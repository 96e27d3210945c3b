"""A client of a draft service has limited resources, and its load has a limited effect on other clients."""

import random
from collections.abc import Callable

import pytest

from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.rate_limits import MAX_SOURCES, NOTIFY_SECONDS, RECENT, RateLimiter
from streamserve.draft_service.server.types import DraftBatch
from streamserve.protocol.drafting import DRAFT_VERSION, Busy, Drafts, Hello, Lost, Welcome
from tests.draft_service.service_client import ServiceClient

MIB = 1 << 20


def refused(client: ServiceClient) -> dict[str, int]:
    return client.service.statistics.counters.refused


def hello(client: ServiceClient, name: str, key: str):
    return client.hello(name, key=key).message


# Limits before a message is decoded


def test_bytes_are_charged_by_the_size_of_frames():
    rate_limits = RateLimiter(Limits(byte_rate=MIB, byte_burst=4 * MIB))
    for _ in range(4):
        assert rate_limits.charge(b"a", MIB, 0.0) is None
    exceeded_limit = rate_limits.charge(b"a", MIB, 0.0)
    assert (exceeded_limit.reason, exceeded_limit.retry, exceeded_limit.notify) == ("bytes", 1.0, True)
    assert not rate_limits.charge(b"a", MIB, NOTIFY_SECONDS / 2).notify, "notified a moment ago"
    assert rate_limits.charge(b"a", MIB, 1.0) is None
    assert rate_limits.charge(b"b", MIB, 1.0) is None, "another client has a separate budget"


def test_a_message_larger_than_the_burst_does_not_wait_for_ever():
    rate_limits = RateLimiter(Limits(byte_rate=MIB, byte_burst=2 * MIB))
    assert rate_limits.charge(b"a", 8 * MIB, 0.0) is None
    assert rate_limits.charge(b"a", 1, 1.0).reason == "bytes"


@pytest.mark.parametrize("greedy", [1, 20])
def test_each_client_gets_its_share_of_the_total_rate(greedy):
    """A client below an equal share of the total rate is always read, however much other clients send."""
    rate_limits = RateLimiter(Limits(byte_rate=4.0 * MIB, byte_burst=4.0 * MIB, total_byte_rate=8.0 * MIB))
    read = dict.fromkeys(range(greedy), 0)
    small = turned_away = 0
    for step in range(4000):
        now = step / 1000
        for name in range(greedy):
            if rate_limits.charge(str(name).encode(), MIB // 64, now) is None:
                read[name] += MIB // 64
        if step % 10 == 0:
            small += 1
            turned_away += rate_limits.charge(b"small", 2048, now) is not None
    assert turned_away == 0
    assert small == 400
    bursts = 8.0 * MIB + greedy * MIB  # of the total rate, and of each client's share
    assert sum(read.values()) <= 4 * 8.0 * MIB + 4 * bursts
    assert sum(read.values()) >= 4 * min(8.0, 4.0 * greedy) * MIB * 0.8
    assert min(read.values()) >= 0.2 * max(read.values())


def test_clients_that_come_and_go_are_forgotten():
    rate_limits = RateLimiter(Limits())
    for number in range(3 * MAX_SOURCES):
        rate_limits.charge(str(number).encode(), 1, number * RECENT)
    assert len(rate_limits._sources) == MAX_SOURCES


def test_a_client_beyond_its_rate_gets_the_reason_and_a_retry_time():
    client = ServiceClient(limits=Limits(byte_rate=1000.0, byte_burst=2000.0))
    hello(client, "a", "k")
    answers = [out.message for _ in range(40) for out in client.request("a", client.delta("a", [1] * 50))]
    (busy,) = [message for message in answers if isinstance(message, Busy)]
    assert (busy.nonce, busy.tag, busy.reason) == (0, 0, "bytes")
    assert busy.retry >= NOTIFY_SECONDS
    assert refused(client)["bytes"] > 10


# Limits on stored data


def stored_sequences(client: ServiceClient, name: str) -> int:
    """Return the number of sequences that are stored for a target."""
    tag = client.welcomes[name].tag
    return len(client.service.sessions[tag].sequences)


def fill(client: ServiceClient, name: str, count: int, tokens: int = 2000) -> list:
    """Sync many long sequences, and draft their trees; return the immediate answers."""
    answers = []
    for sequence in range(1, count + 1):
        delta = client.delta(name, [sequence % 50] * tokens, sequence=sequence, nodes=1)
        answers += client.request(name, delta)
        while client.draft_outputs():
            pass
    return answers


def test_a_client_that_fills_the_storage_loses_only_its_own_sequences():
    client = ServiceClient(num_blocks=400, limits=Limits(storage_bytes=4 * MIB))
    for name in ("small", "greedy"):
        hello(client, name, name)
    fill(client, "small", 3)
    fill(client, "greedy", 60)
    storage = client.service.table.storage
    assert storage.dropped > 20
    assert storage.total <= storage.limit
    assert stored_sequences(client, "small") == 3, "sequences of other clients stay"
    (out,) = client.request("greedy", client.delta("greedy", [1], sequence=1, retained=2000, base=1))
    assert isinstance(out.message, Lost), "a dropped sequence must be synced again"
    assert client.request("small", client.delta("small", [1], sequence=1, retained=2000)) == []


def test_a_new_client_gets_storage_from_the_one_with_the_most():
    client = ServiceClient(num_blocks=400, limits=Limits(storage_bytes=4 * MIB))
    hello(client, "greedy", "g")
    fill(client, "greedy", 60)
    hello(client, "late", "l")
    answers = fill(client, "late", 5)
    assert not [out for out in answers if isinstance(out.message, Busy)]
    assert stored_sequences(client, "late") == 5


def test_a_sequence_larger_than_the_storage_is_refused():
    client = ServiceClient(limits=Limits(storage_bytes=MIB))
    (out,) = client.request("a", client.delta("a", [1] * 40_000))
    assert (out.message.reason, out.message.retry) == ("memory", 1.0)
    assert client.service.table.storage.total == 0
    assert refused(client) == {"memory": 1}


def test_released_sequences_and_closed_sessions_are_not_counted():
    client = ServiceClient(num_blocks=400, lease=1.0)
    fill(client, "a", 5)
    fill(client, "b", 5)
    assert client.service.table.storage.total > 10 * 2000 * 8
    client.request("a", released=[1, 2, 3, 4, 5])
    client.service.tick(client.now + 100.0)
    assert client.service.table.storage.total == 0
    assert client.service.memory.pool.free == 400
    assert not client.service.memory._holders


# Limits on sessions, and which sessions are drafted for


def test_a_client_with_all_sessions_loses_one_to_another_client():
    client = ServiceClient(limits=Limits(max_sessions=4))
    for number in range(4):
        assert isinstance(hello(client, f"greedy-{number}", "g"), Welcome)
    assert hello(client, "greedy-4", "g") == Busy(7, 0, 1.0, "sessions")
    for name in ("one", "two", "three"):
        assert isinstance(hello(client, name, name), Welcome)
    assert hello(client, "four", "four") == Busy(7, 0, 1.0, "sessions"), "each client has one session"
    keys = sorted(session.key for session in client.service.sessions.values())
    assert keys == ["g", "one", "three", "two"]


def test_a_connection_has_one_session():
    client = ServiceClient()
    first = hello(client, "a", "k")
    assert hello(client, "a", "k") == first, "the same Hello twice"
    (out,) = client.service.heard(b"a", _hello(8), client.now, "k")
    assert isinstance(out.message, Welcome)
    assert set(client.service.sessions) == {out.message.tag}
    assert out.message.tag != first.tag


def _hello(nonce: int):
    return Hello(version=DRAFT_VERSION, tokenizer="t", vocabulary="v", name="a", nonce=nonce)


def test_the_first_session_of_each_client_is_drafted_for_before_the_second_of_any():
    client = ServiceClient(max_batch=1, limits=Limits(max_sessions=8))
    for number in range(6):
        hello(client, f"greedy-{number}", "g")
        client.request(f"greedy-{number}", client.delta(f"greedy-{number}", [1]))
    two_gain(client)
    assert isinstance(hello(client, "small", "s"), Welcome)
    assert client.request("small", client.delta("small", [1, 2])) == []
    (busy,) = client.request("greedy-1", client.delta("greedy-1", [1, 2]))
    assert busy.message.reason == "targets"
    assert client.request("greedy-0", client.delta("greedy-0", [1, 2])) == []
    assert hello(client, "greedy-7", "g").reason == "targets"


def two_gain(client: ServiceClient) -> None:
    """Make drafting so expensive that only two targets benefit from it."""
    statistics = client.service.statistics
    for _ in range(40):
        statistics.returned(0.04, 0.04, 0.03)
        statistics.drafted(1, 4, 0.04, False)
        statistics.verified(4, 5)
    assert client.service.table.n_max() == 2


@pytest.mark.parametrize(
    ("count", "nodes", "reason"), [(20, 1000, "nodes"), (33, 4, "in-flight"), (4097, 0, "rate")]
)
def test_a_message_that_requests_too_much_is_refused_with_the_reason(count, nodes, reason):
    client = ServiceClient(limits=Limits(in_flight=32))
    deltas = [client.delta("a", [1], sequence=number, nodes=nodes, depth=0) for number in range(count)]
    (out,) = client.request("a", *deltas)
    assert (out.message.reason, out.message.retry) == (reason, 1.0)
    assert not client.service.sessions[client.welcomes["a"].tag].sequences, "no work was done for it"
    assert client.service.loop.batch(0.0) is None


def test_batches_are_bounded_in_nodes_and_tokens():
    limits = Limits(batch_nodes=100, batch_tokens=500)
    client = ServiceClient(num_blocks=4000, max_read=64, limits=limits)
    for name in "ab":
        deltas = [client.delta(name, [1] * 90, sequence=number, nodes=30) for number in range(1, 31)]
        client.request(name, *deltas)
    batches, answered = 0, 0
    while (batch := client.service.loop.batch(client.now)) is not None:
        batches += 1
        assert sum(request.nodes for request in batch.requests) <= limits.batch_nodes
        assert sum(request.length - request.computed for request in batch.requests) <= limits.batch_tokens
        client.now += 0.01
        outs = client.service.loop.drafted(batch, client.drafter.draft(batch), client.now)
        answered += sum(len(out.message.drafts) for out in outs if isinstance(out.message, Drafts))
    assert answered == 60
    assert batches > 20


# One greedy client and one modest client


def latency(client: ServiceClient, crowd: Callable[[], None], rounds: int = 60) -> list[float]:
    """Return the seconds until each answer to a client that requests a tree of four tokens every 30 ms."""
    hello(client, "modest", "modest")
    rng, tokens, waits = random.Random(3), 1, []
    client.request("modest", client.delta("modest", [1]))
    requested_at, due = client.now, None
    while len(waits) < rounds:
        crowd()
        if due is not None and client.now >= due:
            new = [rng.randrange(50)]
            assert client.request("modest", client.delta("modest", new, retained=tokens)) == []
            tokens, requested_at, due = tokens + 1, client.now, None
        batch = client.service.loop.batch(client.now)
        if batch is None:
            client.now += 0.001
            continue
        client.now += cost(batch)
        for out in client.service.loop.drafted(batch, client.drafter.draft(batch), client.now):
            if out.peer == b"modest":
                waits.append(client.now - requested_at)
                due = client.now + 0.03
    return waits


def cost(batch: DraftBatch) -> float:
    """Return the seconds of a batch: 1 ms for each pass and 20 µs for each token."""
    read = sum(request.length - request.computed for request in batch.requests)
    depth = max(request.depth for request in batch.requests)
    nodes = sum(request.nodes for request in batch.requests)
    return 0.001 * max(depth, 1) + 2e-5 * (read + nodes)


class Greedy:
    """A client with the maximum number of sessions, each of which always requests the maximum."""

    def __init__(self, client: ServiceClient, sessions: int) -> None:
        self.client = client
        self.names = [f"greedy-{number}" for number in range(sessions)]
        self.refused: dict[str, int] = {}
        for name in self.names:
            hello(client, name, "greedy")

    def __call__(self) -> None:
        for name in self.names:
            if name in self.client.welcomes:
                session = self.client.service.sessions.get(self.client.welcomes[name].tag)
                if session is not None and session.requested_at is None:
                    self._request(name)

    def _request(self, name: str) -> None:
        deltas = [
            self.client.delta(name, [1] * 200, sequence=number, depth=16, width=8, nodes=64)
            for number in range(1, 31)
        ]
        for out in self.client.request(name, *deltas, need=0.0):
            if isinstance(out.message, Busy):
                self.refused[out.message.reason] = self.refused.get(out.message.reason, 0) + 1


def test_a_greedy_client_at_all_its_limits_costs_another_no_more_than_a_batch(record):
    limits = Limits(storage_bytes=24 * MIB, in_flight=200, max_sessions=16, batch_nodes=512, byte_rate=1e6)
    alone = latency(ServiceClient(num_blocks=600, max_batch_seconds=0.05, limits=limits), lambda: None)
    client = ServiceClient(num_blocks=600, max_batch_seconds=0.05, limits=limits)
    greedy = Greedy(client, 20)
    contended = latency(client, greedy)
    assert greedy.refused.get("in-flight") or greedy.refused.get("bytes")
    served = [session for session in client.service.sessions.values() if session.account.key == "greedy"]
    assert sum(session.trees for session in served) > 100, "the greedy client received trees too"
    # The longest batch has 16 levels and the maximum of nodes and tokens. The other client waits for the
    # running batch and for its own.
    longest = 0.001 * 16 + 2e-5 * (limits.batch_nodes + limits.batch_tokens)
    mean = sum(contended) / len(contended)
    record(alone=sum(alone) / len(alone), beside=mean, worst=max(contended), longest_batch=longest)
    print(f"alone {sum(alone) / len(alone):.4f} s, mean {mean:.4f} s, worst {max(contended):.4f} s")
    assert max(contended) <= 2 * longest
    assert mean <= 0.02 + longest
    assert client.service.statistics.counters.rebuilt == 0 or not evicted(client, "modest")


def evicted(client: ServiceClient, name: str) -> bool:
    """Return whether a target's sequence lost its KV."""
    session = client.service.sessions[client.welcomes[name].tag]
    return any(not one.blocks for one in session.sequences.values())


def test_more_sessions_get_a_client_no_more_time():
    """A client gets no more time by more sessions: if ten sessions of one client and one of another always
    request drafts, each client gets half."""
    client = ServiceClient(max_batch=1)
    names = [*(f"many-{number}" for number in range(10)), "one"]
    for name in names:
        hello(client, name, name.partition("-")[0])
        client.request(name, client.delta(name, [1]))
    served = dict.fromkeys(names, 0)
    for _ in range(400):
        for name in client.draft_batch():
            served[name] += 1
            client.request(name, client.delta(name, [1, 2]))
    assert abs(served["one"] - 200) <= 5
    assert max(served[name] for name in names[:-1]) <= min(served[name] for name in names[:-1]) + 3


def test_kv_of_a_client_within_its_share_is_not_evicted():
    client = ServiceClient(num_blocks=60)
    hello(client, "modest", "m")
    hello(client, "greedy", "g")
    client.request("modest", client.delta("modest", [1] * 100))
    client.draft_batch()
    for sequence in range(1, 40):
        client.request("greedy", client.delta("greedy", [2] * 100, sequence=sequence))
        while client.draft_outputs():
            pass
    assert client.service.memory.evictions > 20
    assert not evicted(client, "modest")


def test_in_bounded_batches_every_sequence_of_a_session_is_drafted_for():
    """Every sequence of a session is drafted for, even if batches are limited: of ten sequences that request
    again at once, three fit into a batch."""
    client = ServiceClient(num_blocks=400, limits=Limits(batch_nodes=12))
    lengths = dict.fromkeys(range(10), 1)
    for sequence in lengths:
        client.request("a", client.delta("a", [1], sequence=sequence))
    served = dict.fromkeys(lengths, 0)
    for _ in range(100):
        for out in client.draft_outputs():
            for draft in out.message.drafts:
                served[draft.sequence] += 1
                delta = client.delta("a", [2], sequence=draft.sequence, retained=lengths[draft.sequence])
                lengths[draft.sequence] += 1
                client.request("a", delta)
    assert min(served.values()) >= 20, "an equal share would be 30"
    assert sum(served.values()) == 300
