"""Who is drafted for next."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.server.queue import TURNS
from tests.draft_service.talk import Talk


def busy(talk: Talk, names: list[str], batcher: int) -> Counter:
    """Everybody asks again as soon as they are answered; how often each was."""
    served = Counter()
    for name in names:
        talk.ask(name, talk.delta(name, [1]))
    for _ in range(batcher):
        for name in talk.turn():
            served[name] += 1
            talk.ask(name, talk.delta(name, [1, 2]))
    return served


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5))
def test_busy_targets_get_their_shares(weights):
    names = [f"t{number}" for number in range(len(weights))]
    talk = Talk(max_batch=1, shares=dict(zip(names, weights, strict=True)))
    batcher = 60 * len(weights)
    served = busy(talk, names, batcher)
    for name, weight in zip(names, weights, strict=True):
        ahead = TURNS * max(weights) + 1  # the window is in time by weight
        assert abs(served[name] - batcher * weight / sum(weights)) <= ahead


def test_who_was_away_does_not_catch_up():
    talk = Talk(max_batch=1)
    talk.ask("late", talk.delta("late", [1]))
    talk.turn()
    busy(talk, ["a", "b"], 50)
    served = busy(talk, ["late"], 30)
    assert 8 <= served["late"] <= 16, "of what it did not use it brings a few turns"


def test_among_equals_the_nearest_deadline_goes_first():
    talk = Talk(max_batch=1)
    talk.ask("patient", talk.delta("patient", [1]), need=1.0)
    talk.ask("indifferent", talk.delta("indifferent", [1]))
    talk.ask("urgent", talk.delta("urgent", [1]), need=0.1)
    assert [talk.turn() for _ in range(3)] == [["urgent"], ["patient"], ["indifferent"]]


def test_urgency_does_not_buy_a_larger_share():
    talk = Talk(max_batch=1)
    served = Counter()
    needs = {"greedy": 0.0, "modest": 1.0}
    for name, need in needs.items():
        talk.ask(name, talk.delta(name, [1]), need=need)
    for _ in range(100):
        for name in talk.turn():
            served[name] += 1
            talk.ask(name, talk.delta(name, [1, 2]), need=needs[name])
    assert abs(served["greedy"] - served["modest"]) <= 4


def test_what_waits_is_drafted_for_together_as_far_as_the_bound_allows():
    talk = Talk(pass_seconds=0.001, max_batch=3, max_batch_seconds=1.0)
    for name in "abcde":
        talk.ask(name, talk.delta(name, [1]))
    assert sorted(talk.turn()) == ["a", "b", "c"]
    assert sorted(talk.turn()) == ["d", "e"]
    slow = Talk(pass_seconds=0.001, max_batch=3, max_batch_seconds=1e-6)
    for name in "abc":
        slow.ask(name, slow.delta(name, [1]))
    assert slow.turn() == ["a"], "at least one, whatever it takes"


def test_nothing_waits_while_there_is_something_to_draft():
    talk = Talk(max_batch=2)
    for name in "abcd":
        talk.ask(name, talk.delta(name, [1]))
    while talk.turn():
        pass
    assert all(session.asked is None for session in talk.service.sessions.values())
    assert talk.service.statistics.counters.idle == 0.0
