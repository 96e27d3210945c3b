"""Orders of service: who goes first, and how small a batch must stay."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.ordering import ORDERS, PATIENCE, STRETCH, Candidate, batch_cap, rank, turns
from streamserve.speculation.slo import NO_NEED, Need

times = st.floats(0, 100)
needs = st.none() | st.builds(Need, st.floats(0.001, 1), times, st.integers(0, 100))
candidates = st.lists(
    st.builds(
        Candidate, arrival=times, priority=st.integers(-2, 2), decoding=st.booleans(),
        deadline=st.none() | times, need=needs.map(lambda need: need or NO_NEED),
    ),
    max_size=12,
)  # fmt: skip


@given(order=st.sampled_from(ORDERS), candidates=candidates, now=times)
def test_every_order_ranks_everybody_and_priority_comes_first(order, candidates, now) -> None:
    ranked = rank(order, candidates, now)
    assert sorted(ranked) == list(range(len(candidates)))
    priorities = [candidates[i].priority for i in ranked]
    assert priorities == sorted(priorities)
    assert sorted(turns(order, candidates, ranked, now)) == sorted(ranked)


def test_orders_of_arriving_prompts() -> None:
    partial = Candidate(1.0, complete=False, last_chunk_at=8.0, computed=30)
    complete = Candidate(2.0, last_chunk_at=5.0, computed=10)
    fresh = Candidate(3.0, complete=False, last_chunk_at=9.0, computed=20)
    three = [partial, complete, fresh]
    assert rank("arrival", three, 9.0) == [0, 1, 2]
    assert rank("fcfs", three, 9.0) == rank("slo", three, 9.0) == [1, 0, 2]
    assert rank("lcas", three, 9.0) == [2, 0, 1]
    assert rank("mcps", three, 9.0) == [0, 2, 1]
    assert rank("lcas", three, 5.0 + PATIENCE) == [1, 2, 0], (
        "who waits with a complete prompt is not forgotten"
    )


def test_an_arriving_prompt_that_rests_ranks_behind_those_with_something_to_compute() -> None:
    resting = Candidate(1.0, complete=False, computed=30, resting=True)
    newcomer, complete = Candidate(2.0, complete=False, remaining=9), Candidate(3.0)
    assert rank("slo", [resting, newcomer, complete], 9.0) == [2, 1, 0]
    assert rank("arrival", [resting, newcomer, complete], 9.0) == [0, 1, 2]


def test_a_prompt_that_was_streamed_waits_since_it_is_complete() -> None:
    streamed, plain = Candidate(1.0, asked_at=5.0), Candidate(3.0)
    for order in ("slo", "fcfs", "stta"):
        assert rank(order, [streamed, plain], 6.0) == [1, 0]
    assert rank("arrival", [streamed, plain], 6.0) == [0, 1]


def test_of_streamed_prompts_who_needs_little_does_not_wait_for_who_needs_much() -> None:
    much, little = Candidate(0.0, asked_at=5.0, work=2.0), Candidate(0.0, asked_at=6.0, work=0.1)
    assert rank("slo", [much, little], 6.0) == [1, 0]
    late = Candidate(0.0, asked_at=5.0 + STRETCH * 2.0, work=0.1)
    assert rank("slo", [much, late], late.asked_at) == [0, 1]


def test_arriving_prompts_have_their_turns_by_how_long_they_have_lasted() -> None:
    three = [Candidate(1.0, complete=False), Candidate(2.0, complete=False, steady=3), Candidate(3.0)]
    for order in ("slo", "fcfs", "stta"):
        assert turns(order, three, rank(order, three, 4.0), 4.0) == [2, 1, 0]
    assert turns("slo", three, [0], 4.0) == [0]


@given(order=st.sampled_from(ORDERS), candidates=candidates, now=times)
def test_ranking_does_not_depend_on_who_else_is_there(order, candidates, now) -> None:
    """So two sequences never take each other's memory in turns."""
    ranked = rank(order, candidates, now)
    without = candidates[:-1]
    assert [i for i in ranked if i < len(without)] == rank(order, without, now)


@pytest.mark.parametrize("order", ["chunked", "prefill-first", "fcfs", "stta"])
def test_orders_by_arrival_do_not_look_at_targets(order) -> None:
    late = Candidate(2.0, deadline=2.1, need=Need(0.001, 9.0, 0))
    assert rank(order, [late, Candidate(1.0)], 2.0) == [1, 0]


def test_slo_puts_those_with_targets_first_by_deadline() -> None:
    waiting = [Candidate(1.0), Candidate(2.0, deadline=4.0), Candidate(3.0, deadline=3.5)]
    assert rank("slo", waiting, 3.0) == [2, 1, 0]


def test_slo_does_not_chase_what_is_missed_and_lets_nobody_wait_forever() -> None:
    missed, urgent = Candidate(1.0, deadline=2.0), Candidate(5.0, deadline=6.0)
    assert rank("slo", [missed, urgent], 5.0) == [1, 0]
    later = Candidate(1.0 + PATIENCE, deadline=2.0 + PATIENCE)
    assert rank("slo", [later, missed], later.arrival) == [1, 0]


def test_slo_puts_who_has_a_target_for_its_further_tokens_first() -> None:
    """Even while it waits: preempted, its clock runs on."""
    preempted = Candidate(3.0, need=Need(0.1, 1.0, 3))
    assert rank("slo", [Candidate(1.0, deadline=3.2), Candidate(0.0, decoding=True), preempted], 3.1) == [
        2,
        0,
        1,
    ]


def test_stta_takes_who_is_nearest_to_missing_its_target() -> None:
    ahead = Candidate(1.0, decoding=True, need=Need(0.1, 0.5, 9))
    behind = Candidate(2.0, decoding=True, need=Need(0.1, 0.5, 5))
    prompt = Candidate(3.0, deadline=4.0)
    free = Candidate(0.0, decoding=True)
    assert turns("stta", [free, ahead, prompt, behind], range(4), 3.8) == [3, 2, 1, 0]


def test_turns_in_a_step() -> None:
    both = [Candidate(1.0), Candidate(2.0, decoding=True)]
    assert turns("slo", both, [0, 1], 2.0) == turns("chunked", both, [0, 1], 2.0) == [1, 0]
    assert turns("prefill-first", both, [1, 0], 2.0) == [0, 1]
    assert turns("fcfs", both, [0, 1], 2.0) == [0, 1]


@given(tpot=st.none() | st.floats(0.0001, 100), most=st.integers(1, 600))
def test_a_capped_batch_is_the_largest_that_keeps_the_strictest_target(tpot, most) -> None:
    def step(rows: int) -> float:
        return 1.0 + rows // 4

    cap = batch_cap([NO_NEED, Need(tpot), Need(50.0)], step, most)
    strictest = min(tpot or inf, 50.0)
    assert 1 <= cap <= most
    assert cap == 1 or step(cap) <= strictest
    assert cap == most or step(cap + 1) > strictest
