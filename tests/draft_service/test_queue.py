"""Sessions are served in the defined order, and batches respect their limits."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.server.queue import LEAD_BATCHES
from tests.draft_service.service_client import ServiceClient


def busy(client: ServiceClient, names: list[str], batches: int) -> Counter:
    """Draft batches while every target requests again as soon as it is answered. Return the answers of each
    target."""
    served = Counter()
    for name in names:
        client.request(name, client.delta(name, [1]))
    for _ in range(batches):
        for name in client.draft_batch():
            served[name] += 1
            client.request(name, client.delta(name, [1, 2]))
    return served


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5))
def test_busy_targets_get_their_shares(weights):
    names = [f"t{number}" for number in range(len(weights))]
    client = ServiceClient(max_batch=1, shares=dict(zip(names, weights, strict=True)))
    batches = 60 * len(weights)
    served = busy(client, names, batches)
    for name, weight in zip(names, weights, strict=True):
        ahead = LEAD_BATCHES * max(weights) + 1  # time in the window is shared by weight
        assert abs(served[name] - batches * weight / sum(weights)) <= ahead


def test_an_idle_target_does_not_accumulate_time():
    client = ServiceClient(max_batch=1)
    client.request("late", client.delta("late", [1]))
    client.draft_batch()
    busy(client, ["a", "b"], 50)
    served = busy(client, ["late"], 30)
    assert 8 <= served["late"] <= 16, "unused time is credited for a few batches only"


def test_among_equals_the_nearest_deadline_goes_first():
    client = ServiceClient(max_batch=1)
    client.request("patient", client.delta("patient", [1]), need=1.0)
    client.request("indifferent", client.delta("indifferent", [1]))
    client.request("urgent", client.delta("urgent", [1]), need=0.1)
    assert [client.draft_batch() for _ in range(3)] == [["urgent"], ["patient"], ["indifferent"]]


def test_tokens_that_are_due_for_a_target_go_before_those_that_are_only_waited_for():
    client = ServiceClient(max_batch=1)
    client.request("waits", client.delta("waits", [1]), need=0.01)
    client.request("loose", client.delta("loose", [1], need=0.5), need=1.0)
    client.request("strict", client.delta("strict", [1], need=0.05), need=1.0)
    assert [client.draft_batch() for _ in range(3)] == [["strict"], ["loose"], ["waits"]]


def test_due_tokens_do_not_buy_a_larger_share():
    client = ServiceClient(max_batch=1)
    served = Counter()
    needs = {"strict": 0.0, "best effort": None}
    for name, need in needs.items():
        client.request(name, client.delta(name, [1], need=need))
    for _ in range(100):
        for name in client.draft_batch():
            served[name] += 1
            client.request(name, client.delta(name, [1, 2], need=needs[name]))
    assert abs(served["strict"] - served["best effort"]) <= 4


def test_of_one_target_the_sequences_that_are_due_first_are_drafted_for_first():
    client = ServiceClient(num_blocks=1000)
    needs = (None, 0.9, 0.1, 0.5, None, 0.3, 0.7, 0.2, 0.6, 0.4)
    client.request("a", *(client.delta("a", [1], sequence=n, nodes=500, need=s) for n, s in enumerate(needs)))
    batch = client.service.loop.batch(client.now)
    drafted = [sequence.name for _, sequences in batch.members for sequence in sequences]
    assert drafted == [2, 7, 5, 9, 3, 8, 6, 1], "requests without a latency target wait for the next batch"


def test_urgency_does_not_buy_a_larger_share():
    client = ServiceClient(max_batch=1)
    served = Counter()
    needs = {"greedy": 0.0, "modest": 1.0}
    for name, need in needs.items():
        client.request(name, client.delta(name, [1]), need=need)
    for _ in range(100):
        for name in client.draft_batch():
            served[name] += 1
            client.request(name, client.delta(name, [1, 2]), need=needs[name])
    assert abs(served["greedy"] - served["modest"]) <= 4


def test_waiting_requests_are_batched_within_the_bound():
    client = ServiceClient(pass_seconds=0.001, max_batch=3, max_batch_seconds=1.0)
    for name in "abcde":
        client.request(name, client.delta(name, [1]))
    assert sorted(client.draft_batch()) == ["a", "b", "c"]
    assert sorted(client.draft_batch()) == ["d", "e"]
    slow = ServiceClient(pass_seconds=0.001, max_batch=3, max_batch_seconds=1e-6)
    for name in "abc":
        slow.request(name, slow.delta(name, [1]))
    assert slow.draft_batch() == ["a"], "a batch has at least one request, however long it takes"


def test_the_service_is_never_idle_with_waiting_requests():
    client = ServiceClient(max_batch=2)
    for name in "abcd":
        client.request(name, client.delta(name, [1]))
    while client.draft_batch():
        pass
    assert all(session.requested_at is None for session in client.service.sessions.values())
    assert client.service.statistics.counters.idle == 0.0
