"""Every policy by name: what it asks for and verifies stays within what there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.speculation.adaserve import token_budget
from streamserve.speculation.outlook import Candidate, Drafted, Outlook
from streamserve.speculation.policies import BUDGETED, NAMES, parse_policy, select, shapes
from streamserve.speculation.shapes import PLAIN, SPECINFER, Shape, fit
from streamserve.speculation.slo import Need
from streamserve.speculation.specustream import Flow
from streamserve.speculation.tree import chain
from tests.speculation.strategies import connected, curves, needs, trees

POLICIES = (*NAMES, "fixed:3", "fixed-tree:2x3")

candidates = st.lists(
    st.builds(Candidate, depth=st.integers(0, 20), nodes=st.integers(0, 32), need=needs,
              priority=st.integers(-1, 1), id=st.integers(1, 9)),
    min_size=1, max_size=12, unique_by=lambda one: one.id,
)  # fmt: skip


def outlook(asking, curve=None, undrafted=()) -> Outlook:
    return Outlook(
        candidates=asking,
        others=len(undrafted),
        step=(lambda rows: curve[rows]) if curve else lambda rows: 1.0 + rows / 100,
        draft=lambda shapes: 0.05 * max(shape.depth for shape in shapes),
        covers=((0.6,), (0.7,)),
        nodes=8,
        undrafted=undrafted,
        load=0.5,
        acceptance=0.5,
        throughput=100.0,
    )


@pytest.mark.parametrize("name", POLICIES)
@given(asking=candidates, curve=curves, undrafted=st.lists(needs, max_size=3))
def test_every_request_gets_a_shape(name, asking, curve, undrafted) -> None:
    found, _ = shapes(parse_policy(name), outlook(asking, curve, undrafted), Flow())
    assert len(found) == len(asking)
    for shape, one in zip(found, asking, strict=True):
        cut = fit(shape, one.depth, one.nodes)
        assert cut.depth <= one.depth
        assert cut.nodes <= one.nodes


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(trees(), min_size=1, max_size=5), curves, st.floats(0, 1), st.integers(0, 40), st.data())
def test_what_is_verified_is_connected_and_within_the_budget(
    name, forest, curve, spent, budget, data
) -> None:
    undrafted = data.draw(st.lists(needs, max_size=3))
    drafted = Drafted(
        forest, [data.draw(needs) for _ in forest], undrafted, len(forest) + len(undrafted), spent,
        lambda rows: curve[rows], budget,
    )  # fmt: skip
    kept = select(parse_policy(name), drafted)
    assert len(kept) == len(forest), "nobody loses its own token"
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, kept, strict=True))
    guesses = sum(len(nodes) - 1 for nodes in kept)
    if name == "goodput":
        assert guesses <= budget
    elif name in BUDGETED:
        room = max(0, token_budget(drafted.step) - drafted.decoding)
        assert guesses <= min(room + (name == "adaserve-printed"), budget)


@pytest.mark.parametrize("name", ["adaserve", "adaserve-printed", "goodput"])
def test_who_lags_further_gets_no_fewer_guesses(name) -> None:
    tree = chain(tuple(range(7)), tuple(0.6**n for n in range(7)))
    counts = []
    for late in range(4):
        drafted = Drafted(
            [tree, tree], [Need(1.0, 10.0 + late / 2, 10), Need(50.0, 1.0, 10)], [], 2, 0.0,
            lambda rows: 0.3 + rows / 20, 16,
        )  # fmt: skip
        counts.append(len(select(parse_policy(name), drafted)[0]))
    assert counts == sorted(counts)


def test_threshold_steps_back_as_the_batch_grows_but_for_urgent_requests() -> None:
    policy = parse_policy("threshold")
    drafted_for = {
        (size, priority): sum(
            shape != PLAIN
            for shape in shapes(policy, outlook([Candidate(16, 16, priority=priority)] * size), Flow())[0]
        )
        for size in (8, 9, 31, 32)
        for priority in (0, -1)
    }
    assert drafted_for == {
        (8, 0): 8, (8, -1): 8, (9, 0): 0, (9, -1): 9, (31, 0): 0, (31, -1): 31, (32, 0): 0, (32, -1): 0,
    }  # fmt: skip


def test_specinfers_tree_is_cut_by_levels() -> None:
    assert SPECINFER.nodes == 20
    assert fit(SPECINFER, 20, 32) == SPECINFER
    assert fit(SPECINFER, 20, 8) == Shape(4, 3, SPECINFER.expansion)
    assert fit(SPECINFER, 2, 32).nodes == 2
    assert fit(SPECINFER, 20, 0) == PLAIN


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:99", "fixed-tree:3", "ada serve", "off:1"])
def test_other_names_are_refused(text) -> None:
    with pytest.raises(ValueError, match="is none of goodput"):
        parse_policy(text)
