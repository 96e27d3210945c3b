"""The default order sorts by latency target, then by arrival."""

from streamserve.scheduling.ordering import MAX_WAIT, SLO, WAIT_PER_WORK, rank
from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement


def test_an_idle_prompt_stream_ranks_after_those_with_something_to_compute() -> None:
    idle = RequestView(1.0, complete=False, computed=30, idle=True)
    newcomer, complete = RequestView(2.0, complete=False, remaining=9), RequestView(3.0)
    assert rank(SLO, [idle, newcomer, complete], 9.0) == [2, 1, 0]


def test_streamed_prompts_with_little_work_do_not_wait_for_those_with_much() -> None:
    much, little = (
        RequestView(0.0, completed_at=5.0, prefill_seconds=2.0),
        RequestView(0.0, completed_at=6.0, prefill_seconds=0.1),
    )
    assert rank(SLO, [much, little], 6.0) == [1, 0]
    late = RequestView(0.0, completed_at=5.0 + WAIT_PER_WORK * 2.0, prefill_seconds=0.1)
    assert rank(SLO, [much, late], late.completed_at) == [0, 1]


def test_streamed_prompts_with_deadlines_and_time_to_spare_are_served_in_the_same_order() -> None:
    much, little = (
        RequestView(0.0, completed_at=5.0, prefill_seconds=0.1, deadline=7.0),
        RequestView(0.0, completed_at=5.5, prefill_seconds=0.01, deadline=7.5),
    )
    assert rank(SLO, [much, little], 5.6) == [1, 0]
    assert rank(SLO, [much, little], 6.1) == [0, 1], "the deadline counts once ten times its work is left"


def test_slo_puts_those_with_targets_first_by_deadline() -> None:
    waiting = [RequestView(1.0), RequestView(2.0, deadline=4.0), RequestView(3.0, deadline=3.5)]
    assert rank(SLO, waiting, 3.0) == [2, 1, 0]


def test_slo_does_not_pursue_missed_targets_and_starves_no_request() -> None:
    missed, urgent = RequestView(1.0, deadline=2.0), RequestView(5.0, deadline=6.0)
    assert rank(SLO, [missed, urgent], 5.0) == [1, 0]
    later = RequestView(1.0 + MAX_WAIT, deadline=2.0 + MAX_WAIT)
    assert rank(SLO, [later, missed], later.arrival) == [1, 0]


def test_slo_puts_requests_with_a_tpot_target_first() -> None:
    """The order `slo` puts requests with a TPOT target first, even while they are preempted, as their clock
    keeps running."""
    preempted = RequestView(3.0, requirement=LatencyRequirement(0.1, 1.0, 3))
    assert rank(SLO, [RequestView(1.0, deadline=3.2), RequestView(0.0, decoding=True), preempted], 3.1) == [
        2,
        0,
        1,
    ]
