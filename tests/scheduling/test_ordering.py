"""Service orders, and the batch size that the strictest target allows."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.ordering import (
    MAX_WAIT,
    ORDERS,
    WAIT_PER_WORK,
    batch_cap,
    rank,
    service_order,
)
from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

times = st.floats(0, 100)
requirements = st.none() | st.builds(LatencyRequirement, st.floats(0.001, 1), times, st.integers(0, 100))
requests = st.lists(
    st.builds(
        RequestView, arrival=times, priority=st.integers(-2, 2), decoding=st.booleans(),
        deadline=st.none() | times, requirement=requirements.map(lambda value: value or NO_REQUIREMENT),
    ),
    max_size=12,
)  # fmt: skip


@given(order=st.sampled_from(ORDERS), requests=requests, now=times)
def test_every_order_ranks_all_requests_and_priority_comes_first(order, requests, now) -> None:
    ranked = rank(order, requests, now)
    assert sorted(ranked) == list(range(len(requests)))
    priorities = [requests[i].priority for i in ranked]
    assert priorities == sorted(priorities)
    assert sorted(service_order(order, requests, ranked, now)) == sorted(ranked)


def test_orders_of_prompt_streams() -> None:
    partial = RequestView(1.0, complete=False, last_chunk_at=8.0, computed=30)
    complete = RequestView(2.0, last_chunk_at=5.0, computed=10)
    fresh = RequestView(3.0, complete=False, last_chunk_at=9.0, computed=20)
    requests = [partial, complete, fresh]
    assert rank("arrival", requests, 9.0) == [0, 1, 2]
    assert rank("fcfs", requests, 9.0) == rank("slo", requests, 9.0) == [1, 0, 2]
    assert rank("lcas", requests, 9.0) == [2, 0, 1]
    assert rank("mcps", requests, 9.0) == [0, 2, 1]
    assert rank("lcas", requests, 5.0 + MAX_WAIT) == [1, 2, 0], "complete prompts are not starved"


def test_an_idle_prompt_stream_ranks_after_those_with_something_to_compute() -> None:
    idle = RequestView(1.0, complete=False, computed=30, idle=True)
    newcomer, complete = RequestView(2.0, complete=False, remaining=9), RequestView(3.0)
    assert rank("slo", [idle, newcomer, complete], 9.0) == [2, 1, 0]
    assert rank("arrival", [idle, newcomer, complete], 9.0) == [0, 1, 2]


def test_a_streamed_prompt_waits_from_its_completion() -> None:
    streamed, plain = RequestView(1.0, completed_at=5.0), RequestView(3.0)
    for order in ("slo", "fcfs", "stta"):
        assert rank(order, [streamed, plain], 6.0) == [1, 0]
    assert rank("arrival", [streamed, plain], 6.0) == [0, 1]


def test_streamed_prompts_with_little_work_do_not_wait_for_those_with_much() -> None:
    much, little = (
        RequestView(0.0, completed_at=5.0, prefill_seconds=2.0),
        RequestView(0.0, completed_at=6.0, prefill_seconds=0.1),
    )
    assert rank("slo", [much, little], 6.0) == [1, 0]
    late = RequestView(0.0, completed_at=5.0 + WAIT_PER_WORK * 2.0, prefill_seconds=0.1)
    assert rank("slo", [much, late], late.completed_at) == [0, 1]


def test_prompt_streams_are_served_by_edit_stability() -> None:
    requests = [
        RequestView(1.0, complete=False),
        RequestView(2.0, complete=False, edit_stability=3),
        RequestView(3.0),
    ]
    for order in ("slo", "fcfs", "stta"):
        assert service_order(order, requests, rank(order, requests, 4.0), 4.0) == [2, 1, 0]
    assert service_order("slo", requests, [0], 4.0) == [0]


@given(order=st.sampled_from(ORDERS), requests=requests, now=times)
def test_ranking_does_not_depend_on_the_other_candidates(order, requests, now) -> None:
    """Otherwise two sequences could take each other's memory in turns."""
    ranked = rank(order, requests, now)
    without = requests[:-1]
    assert [i for i in ranked if i < len(without)] == rank(order, without, now)


@pytest.mark.parametrize("order", ["chunked", "prefill-first", "fcfs", "stta"])
def test_orders_by_arrival_do_not_look_at_targets(order) -> None:
    late = RequestView(2.0, deadline=2.1, requirement=LatencyRequirement(0.001, 9.0, 0))
    assert rank(order, [late, RequestView(1.0)], 2.0) == [1, 0]


def test_slo_puts_those_with_targets_first_by_deadline() -> None:
    waiting = [RequestView(1.0), RequestView(2.0, deadline=4.0), RequestView(3.0, deadline=3.5)]
    assert rank("slo", waiting, 3.0) == [2, 1, 0]


def test_slo_does_not_pursue_missed_targets_and_starves_no_request() -> None:
    missed, urgent = RequestView(1.0, deadline=2.0), RequestView(5.0, deadline=6.0)
    assert rank("slo", [missed, urgent], 5.0) == [1, 0]
    later = RequestView(1.0 + MAX_WAIT, deadline=2.0 + MAX_WAIT)
    assert rank("slo", [later, missed], later.arrival) == [1, 0]


def test_slo_puts_requests_with_a_tpot_target_first() -> None:
    """Even while preempted, when its clock runs on."""
    preempted = RequestView(3.0, requirement=LatencyRequirement(0.1, 1.0, 3))
    assert rank("slo", [RequestView(1.0, deadline=3.2), RequestView(0.0, decoding=True), preempted], 3.1) == [
        2,
        0,
        1,
    ]


def test_stta_takes_the_request_nearest_to_missing_its_target() -> None:
    ahead = RequestView(1.0, decoding=True, requirement=LatencyRequirement(0.1, 0.5, 9))
    lagging = RequestView(2.0, decoding=True, requirement=LatencyRequirement(0.1, 0.5, 5))
    prompt = RequestView(3.0, deadline=4.0)
    untargeted = RequestView(0.0, decoding=True)
    assert service_order("stta", [untargeted, ahead, prompt, lagging], range(4), 3.8) == [3, 2, 1, 0]


def test_service_order_of_a_step() -> None:
    both = [RequestView(1.0), RequestView(2.0, decoding=True)]
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
