"""Service orders, and the batch size that the strictest target allows."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.ordering import (
    MAX_WAIT,
    ORDERS,
    WAIT_PER_WORK,
    Candidate,
    batch_cap,
    rank,
    service_order,
)
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

times = st.floats(0, 100)
requirements = st.none() | st.builds(LatencyRequirement, st.floats(0.001, 1), times, st.integers(0, 100))
candidates = st.lists(
    st.builds(
        Candidate, arrival=times, priority=st.integers(-2, 2), decoding=st.booleans(),
        deadline=st.none() | times, requirement=requirements.map(lambda value: value or NO_REQUIREMENT),
    ),
    max_size=12,
)  # fmt: skip


@given(order=st.sampled_from(ORDERS), candidates=candidates, now=times)
def test_every_order_ranks_all_candidates_and_priority_comes_first(order, candidates, now) -> None:
    ranked = rank(order, candidates, now)
    assert sorted(ranked) == list(range(len(candidates)))
    priorities = [candidates[i].priority for i in ranked]
    assert priorities == sorted(priorities)
    assert sorted(service_order(order, candidates, ranked, now)) == sorted(ranked)


def test_orders_of_prompt_streams() -> None:
    partial = Candidate(1.0, complete=False, last_chunk_at=8.0, computed=30)
    complete = Candidate(2.0, last_chunk_at=5.0, computed=10)
    fresh = Candidate(3.0, complete=False, last_chunk_at=9.0, computed=20)
    candidates = [partial, complete, fresh]
    assert rank("arrival", candidates, 9.0) == [0, 1, 2]
    assert rank("fcfs", candidates, 9.0) == rank("slo", candidates, 9.0) == [1, 0, 2]
    assert rank("lcas", candidates, 9.0) == [2, 0, 1]
    assert rank("mcps", candidates, 9.0) == [0, 2, 1]
    assert rank("lcas", candidates, 5.0 + MAX_WAIT) == [1, 2, 0], "complete prompts are not starved"


def test_an_idle_prompt_stream_ranks_after_those_with_something_to_compute() -> None:
    idle = Candidate(1.0, complete=False, computed=30, idle=True)
    newcomer, complete = Candidate(2.0, complete=False, remaining=9), Candidate(3.0)
    assert rank("slo", [idle, newcomer, complete], 9.0) == [2, 1, 0]
    assert rank("arrival", [idle, newcomer, complete], 9.0) == [0, 1, 2]


def test_a_streamed_prompt_waits_from_its_completion() -> None:
    streamed, plain = Candidate(1.0, completed_at=5.0), Candidate(3.0)
    for order in ("slo", "fcfs", "stta"):
        assert rank(order, [streamed, plain], 6.0) == [1, 0]
    assert rank("arrival", [streamed, plain], 6.0) == [0, 1]


def test_streamed_prompts_with_little_work_do_not_wait_for_those_with_much() -> None:
    much, little = (
        Candidate(0.0, completed_at=5.0, prefill_seconds=2.0),
        Candidate(0.0, completed_at=6.0, prefill_seconds=0.1),
    )
    assert rank("slo", [much, little], 6.0) == [1, 0]
    late = Candidate(0.0, completed_at=5.0 + WAIT_PER_WORK * 2.0, prefill_seconds=0.1)
    assert rank("slo", [much, late], late.completed_at) == [0, 1]


def test_prompt_streams_are_served_by_edit_stability() -> None:
    candidates = [
        Candidate(1.0, complete=False),
        Candidate(2.0, complete=False, edit_stability=3),
        Candidate(3.0),
    ]
    for order in ("slo", "fcfs", "stta"):
        assert service_order(order, candidates, rank(order, candidates, 4.0), 4.0) == [2, 1, 0]
    assert service_order("slo", candidates, [0], 4.0) == [0]


@given(order=st.sampled_from(ORDERS), candidates=candidates, now=times)
def test_ranking_does_not_depend_on_the_other_candidates(order, candidates, now) -> None:
    """Otherwise two sequences could take each other's memory in turns."""
    ranked = rank(order, candidates, now)
    without = candidates[:-1]
    assert [i for i in ranked if i < len(without)] == rank(order, without, now)


@pytest.mark.parametrize("order", ["chunked", "prefill-first", "fcfs", "stta"])
def test_orders_by_arrival_do_not_look_at_targets(order) -> None:
    late = Candidate(2.0, deadline=2.1, requirement=LatencyRequirement(0.001, 9.0, 0))
    assert rank(order, [late, Candidate(1.0)], 2.0) == [1, 0]


def test_slo_puts_those_with_targets_first_by_deadline() -> None:
    waiting = [Candidate(1.0), Candidate(2.0, deadline=4.0), Candidate(3.0, deadline=3.5)]
    assert rank("slo", waiting, 3.0) == [2, 1, 0]


def test_slo_does_not_pursue_missed_targets_and_starves_no_request() -> None:
    missed, urgent = Candidate(1.0, deadline=2.0), Candidate(5.0, deadline=6.0)
    assert rank("slo", [missed, urgent], 5.0) == [1, 0]
    later = Candidate(1.0 + MAX_WAIT, deadline=2.0 + MAX_WAIT)
    assert rank("slo", [later, missed], later.arrival) == [1, 0]


def test_slo_puts_requests_with_a_tpot_target_first() -> None:
    """Even while preempted, when its clock runs on."""
    preempted = Candidate(3.0, requirement=LatencyRequirement(0.1, 1.0, 3))
    assert rank("slo", [Candidate(1.0, deadline=3.2), Candidate(0.0, decoding=True), preempted], 3.1) == [
        2,
        0,
        1,
    ]


def test_stta_takes_the_request_nearest_to_missing_its_target() -> None:
    ahead = Candidate(1.0, decoding=True, requirement=LatencyRequirement(0.1, 0.5, 9))
    lagging = Candidate(2.0, decoding=True, requirement=LatencyRequirement(0.1, 0.5, 5))
    prompt = Candidate(3.0, deadline=4.0)
    untargeted = Candidate(0.0, decoding=True)
    assert service_order("stta", [untargeted, ahead, prompt, lagging], range(4), 3.8) == [3, 2, 1, 0]


def test_service_order_of_a_step() -> None:
    both = [Candidate(1.0), Candidate(2.0, decoding=True)]
    assert service_order("slo", both, [0, 1], 2.0) == service_order("chunked", both, [0, 1], 2.0) == [1, 0]
    assert service_order("prefill-first", both, [1, 0], 2.0) == [0, 1]
    assert service_order("fcfs", both, [0, 1], 2.0) == [0, 1]


@given(tpot=st.none() | st.floats(0.0001, 100), limit=st.integers(1, 600))
def test_a_capped_batch_is_the_largest_that_keeps_the_strictest_target(tpot, limit) -> None:
    def step(query_tokens: int) -> float:
        return 1.0 + query_tokens // 4

    cap = batch_cap([NO_REQUIREMENT, LatencyRequirement(tpot), LatencyRequirement(50.0)], step, limit)
    strictest = min(tpot or inf, 50.0)
    assert 1 <= cap <= limit
    assert cap == 1 or step(cap) <= strictest
    assert cap == limit or step(cap + 1) > strictest
