"""Every speculation policy requests and verifies draft tokens within the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines import adaserve
from streamserve.baselines.adaserve import token_budget
from streamserve.baselines.fixed import SPECINFER, fixed_shape
from streamserve.baselines.speculation import NAMES, parse_policy
from streamserve.contracts.tree import chain
from streamserve.speculation.outlook import Candidate, DraftedStep, Outlook
from streamserve.speculation.shapes import PLAIN, TreeShape, fit
from streamserve.speculation.slo import LatencyRequirement
from tests.speculation.strategies import connected, curves, requirements, trees

BUDGETED = [policy.name for policy in adaserve.POLICIES]
POLICIES = (*NAMES, "fixed:3", "fixed-tree:2x3")

candidate_lists = st.lists(
    st.builds(Candidate, depth=st.integers(0, 20), nodes=st.integers(0, 32), requirement=requirements,
              priority=st.integers(-1, 1), id=st.integers(1, 9)),
    min_size=1, max_size=12, unique_by=lambda candidate: candidate.id,
)  # fmt: skip


def outlook(candidates, curve=None, undrafted=()) -> Outlook:
    return Outlook(
        candidates=candidates,
        others=len(undrafted),
        step=(lambda query_tokens: curve[query_tokens])
        if curve
        else lambda query_tokens: 1.0 + query_tokens / 100,
        draft=lambda shapes: 0.05 * max(shape.depth for shape in shapes),
        level_acceptance=((0.6,), (0.7,)),
        nodes=8,
        undrafted=undrafted,
        load=0.5,
        acceptance=0.5,
        throughput=100.0,
    )


@pytest.mark.parametrize("name", POLICIES)
@given(candidates=candidate_lists, curve=curves, undrafted=st.lists(requirements, max_size=3))
def test_every_request_gets_a_shape(name, candidates, curve, undrafted) -> None:
    policy = parse_policy(name)
    assert policy.name == name
    chosen, _ = policy.shapes(outlook(candidates, curve, undrafted), policy.state)
    assert len(chosen) == len(candidates)
    for shape, candidate in zip(chosen, candidates, strict=True):
        truncated = fit(shape, candidate.depth, candidate.nodes)
        assert truncated.depth <= candidate.depth
        assert truncated.nodes <= candidate.nodes


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(trees(), min_size=1, max_size=5), curves, st.floats(0, 1), st.integers(0, 40), st.data())
def test_what_is_verified_is_connected_and_within_the_budget(
    name, forest, curve, spent, budget, data
) -> None:
    undrafted = data.draw(st.lists(requirements, max_size=3))
    drafted = DraftedStep(
        forest, [data.draw(requirements) for _ in forest], undrafted, len(forest) + len(undrafted), spent,
        lambda query_tokens: curve[query_tokens], budget,
    )  # fmt: skip
    selected = parse_policy(name).select(drafted)
    assert len(selected) == len(forest), "every request keeps its own token"
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, selected, strict=True))
    draft_tokens = sum(len(nodes) - 1 for nodes in selected)
    if name == "goodput":
        assert draft_tokens <= budget
    elif name in BUDGETED:
        limit = max(0, token_budget(drafted.step) - drafted.decoding)
        assert draft_tokens <= min(limit + (name == "adaserve-as-published"), budget)


@pytest.mark.parametrize("name", ["adaserve", "adaserve-as-published", "goodput"])
def test_a_larger_lag_gets_no_fewer_draft_tokens(name) -> None:
    tree = chain(tuple(range(7)), tuple(0.6**n for n in range(7)))
    counts = []
    for late in range(4):
        drafted = DraftedStep(
            [tree, tree],
            [LatencyRequirement(1.0, 10.0 + late / 2, 10), LatencyRequirement(50.0, 1.0, 10)], [], 2, 0.0,
            lambda query_tokens: 0.3 + query_tokens / 20, 16,
        )  # fmt: skip
        counts.append(len(parse_policy(name).select(drafted)[0]))
    assert counts == sorted(counts)


def test_threshold_drafts_less_as_the_batch_grows_except_for_urgent_requests() -> None:
    policy = parse_policy("threshold")
    drafted_for = {
        (size, priority): sum(
            shape != PLAIN
            for shape in policy.shapes(outlook([Candidate(16, 16, priority=priority)] * size), None)[0]
        )
        for size in (8, 9, 31, 32)
        for priority in (0, -1)
    }
    assert drafted_for == {
        (8, 0): 8, (8, -1): 8, (9, 0): 0, (9, -1): 9, (31, 0): 0, (31, -1): 31, (32, 0): 0, (32, -1): 0,
    }  # fmt: skip


def test_specinfers_tree_is_truncated_by_levels() -> None:
    assert SPECINFER.nodes == 20
    assert fit(SPECINFER, 20, 32) == SPECINFER
    assert fit(SPECINFER, 20, 8) == TreeShape(4, 3, SPECINFER.expansion)
    assert fit(SPECINFER, 2, 32).nodes == 2
    assert fit(SPECINFER, 20, 0) == PLAIN


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:99", "fixed-tree:3", "ada serve", "off:1"])
def test_other_names_are_refused(text) -> None:
    with pytest.raises(ValueError, match="choose one of goodput"):
        parse_policy(text)


def test_fixed_shapes_are_read_from_the_name() -> None:
    assert fixed_shape("fixed:3") == TreeShape(3, 1)
    assert fixed_shape("fixed-tree:2x3") == TreeShape(3, 2)
    assert fixed_shape("specinfer-tree") == SPECINFER
    assert fixed_shape("goodput") is None


def test_only_the_product_s_own_policy_weighs_costs() -> None:
    assert [name for name in NAMES if parse_policy(name).weighs_costs] == ["goodput"]
    assert [name for name in NAMES if not parse_policy(name).drafts] == ["off"]
