"""SpecuStream as published, with its faults, and corrected."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines.specustream import (
    BASE_DEPTH,
    HISTORY,
    MAX_DEPTH,
    MIN_DEPTH,
    SAMPLE,
    Flow,
    adapt,
    as_published,
    corrected,
    corrected_depth,
)
from streamserve.speculation.outlook import Candidate, Outlook
from streamserve.speculation.shapes import PLAIN, TreeShape

shares, loads = st.floats(0, 1), st.floats(0, 1)


def outlook(acceptance=None, ids=(1,), load=0.0, throughput=400.0, accepted=0, tested=0) -> Outlook:
    return Outlook(
        candidates=[Candidate(20, 32, id=id) for id in ids],
        others=0,
        step=lambda query_tokens: 1.0,
        draft=lambda shapes: 0.0,
        level_acceptance=((0.5,),),
        nodes=32,
        load=load,
        acceptance=acceptance,
        accepted=accepted,
        tested=tested,
        throughput=throughput,
    )


@given(st.lists(st.tuples(shares, loads, st.floats(0, 1e4)), min_size=1, max_size=40))
def test_depths_stay_in_their_range(history) -> None:
    flow, other = Flow(), Flow()
    for acceptance, load, throughput in history:
        flow, depth = adapt(flow, acceptance, load, throughput)
        assert BASE_DEPTH <= depth <= MAX_DEPTH, "as published it never goes below its base"
        assert flow.micro_batch == max(1, 80 // depth)
        tested = outlook(accepted=round(acceptance * 40), tested=40, load=load, throughput=throughput)
        (shape,), other = corrected(tested, other)
        assert MIN_DEPTH <= shape.depth <= MAX_DEPTH


def test_as_published_settles_at_half_of_a_constant_acceptance() -> None:
    flow = Flow()
    for _ in range(50 * HISTORY):
        flow, _ = adapt(flow, 0.8, 0.0, 400.0)
    assert abs(sum(flow.values) / HISTORY - 0.4) < 1e-3


def test_equations_feed_on_their_own_projection() -> None:
    flow = Flow()
    for _ in range(10):
        flow, _ = adapt(flow, 1.0, 0.0, 100.0, equations=True)
    assert abs(flow.recent - 100 * 1.05**10) < 1e-6


def test_as_published_a_request_keeps_its_depth_and_a_pass_its_cap() -> None:
    first, flow = as_published(outlook(0.9, throughput=0.0), Flow())
    later, flow = as_published(outlook(0.0, ids=(1, 2)), flow)
    assert later[0] == first[0] == TreeShape(MAX_DEPTH, 1)
    crowd, flow = as_published(outlook(0.0, ids=range(3, 40)), flow)
    assert sum(shape != PLAIN for shape in crowd) == flow.micro_batch == 16
    assert set(flow.depths) == set(range(3, 40)), "finished requests are forgotten"


def test_corrected_stores_rates_from_the_first_one_on() -> None:
    _, flow = corrected(outlook(accepted=24, tested=40), Flow())
    assert flow.values == (0.6,) * HISTORY
    _, same = corrected(outlook(), flow)
    assert same == flow
    assert corrected_depth(Flow(), 0.0, 400.0) == BASE_DEPTH


def test_corrected_takes_no_rate_of_a_few_draft_tokens() -> None:
    """The corrected form ignores acceptance rates of few draft tokens: they vary from step to step, even at
    constant acceptance."""
    flow = Flow()
    for step in range(4 * SAMPLE):
        _, flow = corrected(outlook(accepted=4 * (step % 2), tested=2 + 2 * (step % 2)), flow)
    assert max(flow.values) - min(flow.values) < 0.1
    assert abs(sum(flow.values) / HISTORY - 4 / 6) < 0.1


@given(shares, shares, loads, loads)
def test_corrected_goes_deeper_for_higher_acceptance_and_shallower_under_load(low, high, load, more) -> None:
    low, high = sorted((low, high))
    load, more = sorted((load, more))
    depth = lambda rate, load: corrected_depth(Flow((rate,) * HISTORY), load, 400.0)  # noqa: E731
    assert depth(high, load) >= depth(low, load)
    assert depth(high, more) <= depth(high, load)


def test_corrected_lowers_the_depth_for_varying_rates() -> None:
    constant, varying = Flow((0.7,) * HISTORY), Flow((1.0, 0.4) * (HISTORY // 2))
    assert corrected_depth(constant, 0.0, 400.0) > corrected_depth(varying, 0.0, 400.0)
