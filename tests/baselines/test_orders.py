"""Properties of every service order, what each order puts first, and the batch size that a latency target
allows."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines.orders import ORDERS, batch_cap
from streamserve.scheduling.ordering import MAX_WAIT, rank, service_order
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


@given(order=st.sampled_from(tuple(ORDERS)), requests=requests, now=times)
def test_every_order_ranks_all_requests_and_priority_comes_first(order, requests, now) -> None:
    ranked = rank(ORDERS[order], requests, now)
    assert sorted(ranked) == list(range(len(requests)))
    priorities = [requests[i].priority for i in ranked]
    assert priorities == sorted(priorities)
    assert sorted(service_order(ORDERS[order], requests, ranked, now)) == sorted(ranked)


def test_orders_of_prompt_streams() -> None:
    partial = RequestView(1.0, complete=False, last_chunk_at=8.0, computed=30)
    complete = RequestView(2.0, last_chunk_at=5.0, computed=10)
    fresh = RequestView(3.0, complete=False, last_chunk_at=9.0, computed=20)
    requests = [partial, complete, fresh]
    assert rank(ORDERS["arrival"], requests, 9.0) == [0, 1, 2]
    assert rank(ORDERS["fcfs"], requests, 9.0) == rank(ORDERS["slo"], requests, 9.0) == [1, 0, 2]
    assert rank(ORDERS["lcas"], requests, 9.0) == [2, 0, 1]
    assert rank(ORDERS["mcps"], requests, 9.0) == [0, 2, 1]
    assert rank(ORDERS["lcas"], requests, 5.0 + MAX_WAIT) == [1, 2, 0], "complete prompts are not starved"


def test_a_streamed_prompt_waits_from_its_completion() -> None:
    streamed, plain = RequestView(1.0, completed_at=5.0), RequestView(3.0)
    for order in ("slo", "fcfs", "stta"):
        assert rank(ORDERS[order], [streamed, plain], 6.0) == [1, 0]
    assert rank(ORDERS["arrival"], [streamed, plain], 6.0) == [0, 1]


def test_prompt_streams_are_served_by_edit_stability() -> None:
    requests = [
        RequestView(1.0, complete=False),
        RequestView(2.0, complete=False, edit_stability=3),
        RequestView(3.0),
    ]
    for order in ("slo", "fcfs", "stta"):
        assert service_order(ORDERS[order], requests, rank(ORDERS[order], requests, 4.0), 4.0) == [2, 1, 0]
    assert service_order(ORDERS["slo"], requests, [0], 4.0) == [0]


@given(order=st.sampled_from(tuple(ORDERS)), requests=requests, now=times)
def test_ranking_does_not_depend_on_the_other_candidates(order, requests, now) -> None:
    """The ranking of two sequences does not depend on the others; otherwise they could take each other's
    memory in turns."""
    ranked = rank(ORDERS[order], requests, now)
    without = requests[:-1]
    assert [i for i in ranked if i < len(without)] == rank(ORDERS[order], without, now)


@pytest.mark.parametrize("order", ["chunked", "prefill-first", "fcfs", "stta"])
def test_orders_by_arrival_do_not_look_at_targets(order) -> None:
    late = RequestView(2.0, deadline=2.1, requirement=LatencyRequirement(0.001, 9.0, 0))
    assert rank(ORDERS[order], [late, RequestView(1.0)], 2.0) == [1, 0]


def test_stta_takes_the_request_nearest_to_missing_its_target() -> None:
    ahead = RequestView(1.0, decoding=True, requirement=LatencyRequirement(0.1, 0.5, 9))
    lagging = RequestView(2.0, decoding=True, requirement=LatencyRequirement(0.1, 0.5, 5))
    prompt = RequestView(3.0, deadline=4.0)
    untargeted = RequestView(0.0, decoding=True)
    assert service_order(ORDERS["stta"], [untargeted, ahead, prompt, lagging], range(4), 3.8) == [3, 2, 1, 0]


def test_service_order_of_a_step() -> None:
    both = [RequestView(1.0), RequestView(2.0, decoding=True)]
    assert (
        service_order(ORDERS["slo"], both, [0, 1], 2.0)
        == service_order(ORDERS["chunked"], both, [0, 1], 2.0)
        == [1, 0]
    )
    assert service_order(ORDERS["prefill-first"], both, [1, 0], 2.0) == [0, 1]
    assert service_order(ORDERS["fcfs"], both, [0, 1], 2.0) == [0, 1]


@given(tpot=st.none() | st.floats(0.0001, 100), limit=st.integers(1, 600))
def test_a_capped_batch_is_the_largest_that_keeps_the_strictest_target(tpot, limit) -> None:
    def step(query_tokens: int) -> float:
        return 1.0 + query_tokens // 4

    cap = batch_cap([NO_REQUIREMENT, LatencyRequirement(tpot), LatencyRequirement(50.0)], step, limit)
    strictest = min(tpot or inf, 50.0)
    assert 1 <= cap <= limit
    assert cap == 1 or step(cap) <= strictest
    assert cap == limit or step(cap + 1) > strictest


@pytest.mark.parametrize("order", ORDERS)
def test_idle_prompt_streams_rank_last_whatever_their_priority(order: str) -> None:
    idle = RequestView(1.0, priority=-9, complete=False, computed=30, idle=True)
    assert rank(ORDERS[order], [idle, RequestView(2.0, priority=5)], 9.0) == [1, 0]
