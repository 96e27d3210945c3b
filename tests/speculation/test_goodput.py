"""Goodput-optimal speculation equals brute force, and its guards work."""

from itertools import product
from math import prod

from hypothesis import example, given
from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree
from streamserve.speculation.goodput import (
    CATCH_UP_STEPS,
    SLACK,
    SLOWEST,
    best_shape,
    select,
    shapes,
    with_catch_up,
)
from streamserve.speculation.outlook import Candidate, DraftedStep, Outlook
from streamserve.speculation.shapes import PLAIN, TreeShape, expected_by_level, expected_tokens
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement
from tests.speculation.strategies import connected, curves, expected, requirements, subtrees, targets, trees


def rate(forest, selected, plain, spent, curve) -> float:
    draft_tokens = sum(len(nodes) - 1 for nodes in selected)
    total = sum(expected(tree, nodes) for tree, nodes in zip(forest, selected, strict=True))
    return total / (spent + curve[plain + draft_tokens])


def drafted(forest, curve, plain=None, spent=0.0, budget=64, requirements=None, undrafted=()) -> DraftedStep:
    """Return a step with these trees. Without requirements no request has a target."""
    plain = len(forest) + len(undrafted) if plain is None else plain
    step = curve if callable(curve) else lambda query_tokens: curve[query_tokens]
    return DraftedStep(
        forest, requirements or [NO_REQUIREMENT] * len(forest), undrafted, plain, spent, step, budget
    )


@given(st.lists(trees(4), min_size=1, max_size=3), curves, st.floats(0, 3), st.integers(0, 12))
def test_the_selection_is_the_best_of_all_connected_ones(forest, curve, spent, budget):
    plain = len(forest)
    selected = select(drafted(forest, curve, spent=spent, budget=budget))
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, selected, strict=True))
    assert sum(len(nodes) - 1 for nodes in selected) <= budget
    best = max(
        rate(forest, selection, plain, spent, curve)
        for selection in product(*map(subtrees, forest))
        if sum(len(nodes) - 1 for nodes in selection) <= budget
    )
    assert rate(forest, selected, plain, spent, curve) >= best - 1e-9


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.integers(1, 8))
def test_requests_without_draft_tokens_keep_their_speed(forest, curve, others):
    plain = len(forest) + others
    selected = select(drafted(forest, curve, undrafted=[NO_REQUIREMENT] * others))
    draft_tokens = sum(len(nodes) - 1 for nodes in selected)
    assert curve[plain + draft_tokens] <= curve[plain] / SLOWEST + 1e-12


def test_a_step_of_the_cost_curve_is_crossed_when_the_next_level_pays():
    """A jump of the cost curve is crossed if the next level pays: the second node alone does not pay, but
    together with the third and fourth at the same cost it does."""
    curve = lambda query_tokens: 1.0 if query_tokens <= 2 else 1.5  # noqa: E731
    tree = TokenTree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3), (1.0,) * 5, (1.0, 0.9, 0.89, 0.88, 0.87))
    assert select(drafted([tree], curve, budget=8)) == [[0, 1, 2, 3, 4]]


def test_prompt_chunks_in_the_step_do_not_make_draft_tokens_cheap():
    """Prompt chunks in the step do not make draft tokens cheap: an unlikely draft token has no more value in
    a step with a long chunk than without."""
    tree = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.05))
    curve = lambda query_tokens: 1.0 + query_tokens / 10  # noqa: E731
    assert select(drafted([tree], curve, budget=8)) == [[0]]
    assert select(drafted([tree], curve, plain=301, budget=8)) == [[0]]
    assert best_shape(1, 300, [[0.05]], curve, lambda shape: 0.0, 8, 8) == PLAIN


def test_nothing_is_drafted_where_the_cost_is_proportional_to_tokens():
    assert (
        best_shape(8, 0, [[0.9]], lambda query_tokens: query_tokens * 1.0, lambda shape: 0.0, 8, 8) == PLAIN
    )


def test_a_free_query_token_is_always_used():
    shape = best_shape(
        1, 0, [[0.8], [0.9]], lambda query_tokens: 1.0 if query_tokens <= 6 else 9.0, lambda shape: 0.0, 8, 16
    )
    assert shape == TreeShape(5, 1)


def test_expensive_drafting_is_avoided():
    assert best_shape(1, 0, [[0.8]], lambda query_tokens: 1.0, lambda shape: shape.depth * 1.0, 8, 8) == PLAIN


@given(st.floats(0, 1), st.integers(0, 20))
def test_expected_tokens_are_the_sum_of_path_probabilities(acceptance, depth):
    assert (
        abs(expected_tokens(acceptance, depth) - sum(acceptance**level for level in range(depth + 1))) < 1e-6
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 8))
def test_levels_may_differ_in_how_likely_they_are(level_acceptance, depth):
    deep = (level_acceptance + level_acceptance[-1:] * depth)[:depth]
    assert (
        abs(
            expected_by_level(level_acceptance, depth) - sum(prod(deep[:level]) for level in range(depth + 1))
        )
        < 1e-9
    )


BUSY = LatencyRequirement(tpot=1.0, decode_seconds=10.0, decoded=10)
"""A request that is on target so far, with one second for each token."""


def met(step: DraftedStep, selected: list[list[int]], slack: float = 0.0) -> list[bool]:
    """Return the requests that are on target or catching up after the step, those without draft tokens last;
    `slack` is in tokens."""
    seconds = step.spent + step.step(step.plain + sum(len(nodes) - 1 for nodes in selected))
    yielded = [expected(tree, nodes) for tree, nodes in zip(step.trees, selected, strict=True)]
    return [
        with_catch_up(requirement).tokens(seconds) <= tokens + slack + 1e-9
        for requirement, tokens in zip(
            (*step.requirements, *step.undrafted), (*yielded, *(1.0 for _ in step.undrafted)), strict=True
        )
    ]


def test_a_lagging_request_gets_required_nodes_before_likelier_ones_of_others() -> None:
    curve = lambda query_tokens: 1.0 + max(0, query_tokens - 3) * 10.0  # noqa: E731
    hard = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.5))
    easy = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.9))
    late = LatencyRequirement(tpot=1.0, decode_seconds=10.5, decoded=10)
    assert select(drafted([hard, easy], curve)) == [[0], [0, 1]]
    assert select(drafted([hard, easy], curve, requirements=[late, NO_REQUIREMENT])) == [[0, 1], [0]]


@given(st.floats(0.01, 20), st.floats(0, 50), st.integers(0, 50), st.floats(0.01, 10))
def test_a_lag_is_caught_up_over_some_steps_and_a_lead_may_be_used(tpot, since, decoded, t) -> None:
    requirement = LatencyRequirement(tpot, since, decoded)
    lag = requirement.tokens(t) - t / tpot
    required = with_catch_up(requirement).tokens(t) - t / tpot
    assert abs(required - (lag / CATCH_UP_STEPS if lag > 0 else lag)) <= 1e-6 * (1 + abs(lag))


def test_infeasible_targets_do_not_cost_those_on_target() -> None:
    curve = lambda query_tokens: 0.9 + 0.05 * query_tokens  # noqa: E731
    long = TokenTree(tuple(range(9)), tuple(range(-1, 8)), (1.0,) * 9, tuple(0.9**n for n in range(9)))
    infeasible = LatencyRequirement(tpot=0.01, decode_seconds=10.0, decoded=10)
    step = drafted([long, long.keep([0])], curve, requirements=[infeasible, BUSY])
    assert met(step, select(step), SLACK)[1]


@given(st.lists(trees(4), min_size=1, max_size=3), curves, st.floats(0, 1), st.data())
def test_all_targets_are_met_where_any_connected_selection_meets_them(forest, curve, spent, data) -> None:
    step_requirements = [data.draw(targets) for _ in forest]
    step = drafted(forest, curve, spent=spent, requirements=step_requirements)
    selected = select(step)
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, selected, strict=True))
    if any(all(met(step, list(selection))) for selection in product(*map(subtrees, forest))):
        assert all(met(step, selected, SLACK))


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.lists(requirements, max_size=3), st.data())
def test_requests_on_target_do_not_fall_below_by_more_than_the_slack(forest, curve, undrafted, data) -> None:
    step_requirements = [data.draw(requirements) for _ in forest]
    step = drafted(forest, curve, requirements=step_requirements, undrafted=undrafted)
    plainly = met(step, [[0] for _ in forest])
    after = met(step, select(step), SLACK)
    assert sum(after) >= sum(plainly)
    if all(plainly):
        assert all(after)


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.integers(1, 4))
def test_targets_leave_those_without_one_their_speed(forest, curve, others) -> None:
    step = drafted(forest, curve, requirements=[BUSY] * len(forest), undrafted=[NO_REQUIREMENT] * others)
    draft_tokens = sum(len(nodes) - 1 for nodes in select(step))
    assert curve[step.plain + draft_tokens] <= curve[step.plain] / SLOWEST + 1e-12


EQUAL = 0.6681266944688354
"""A probability for which 1 + EQUAL + EQUAL is rounded."""
TINY = 2.2e-16
"""A probability that changes 0.01 when added, and does not change 2.01."""


@example(
    [
        TokenTree((0,), (-1,), (1.0,), (1.0,)),
        TokenTree((0, 1, 2), (-1, 0, 0), (1.0,) * 3, (1.0, 0.01, TINY)),
    ],
    [1.0] * 64,
    0.0,
)
@example(
    [
        TokenTree((0, 1), (-1, 0), (1.0,) * 2, (1.0, EQUAL)),
        TokenTree((0, 1, 2), (-1, 0, 0), (1.0,) * 3, (1.0, EQUAL, EQUAL)),
    ],
    [1.0] * 5 + [9.0] * 60,
    0.0,
)
@given(st.lists(trees(), min_size=1, max_size=4), curves, st.floats(0, 1))
def test_loose_targets_change_nothing(forest, curve, spent) -> None:
    loose = [LatencyRequirement(tpot=1e6)] * len(forest)
    blind = select(drafted(forest, curve, spent=spent))
    assert select(drafted(forest, curve, spent=spent, requirements=loose)) == blind


def outlook(requirements, curve, level_acceptance=((0.7,),), undrafted=()) -> Outlook:
    return Outlook(
        candidates=[Candidate(16, 16, requirement) for requirement in requirements],
        others=len(undrafted),
        step=curve,
        draft=lambda shapes: 0.1 * max(shape.depth for shape in shapes),
        level_acceptance=level_acceptance,
        nodes=16,
        undrafted=undrafted,
    )


def test_only_lagging_requests_are_drafted_for_where_drafting_does_not_pay_for_all() -> None:
    curve = lambda query_tokens: 0.5 + 0.5 * query_tokens  # noqa: E731
    late = LatencyRequirement(tpot=4.5, decode_seconds=65.0, decoded=10)
    fine = LatencyRequirement(tpot=50.0, decode_seconds=10.0, decoded=10)
    chosen = shapes(outlook([late, fine, fine, fine], curve))
    assert chosen[0].depth >= 1
    assert chosen[1:] == [PLAIN] * 3
    assert shapes(outlook([fine] * 4, curve)) == [PLAIN] * 4


def test_shapes_are_those_of_no_targets_where_all_are_met() -> None:
    curve = lambda query_tokens: 1.0 + query_tokens / 64  # noqa: E731
    blind = shapes(outlook([NO_REQUIREMENT] * 3, curve))
    assert blind[0].depth > 1
    assert shapes(outlook([LatencyRequirement(tpot=100.0)] * 3, curve)) == blind
