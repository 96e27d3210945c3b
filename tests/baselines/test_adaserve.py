"""AdaServe's two algorithms, of which the first is only a reference here, and its greedy baselines."""

import random
from collections.abc import Sequence
from itertools import product
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines.adaserve import (
    MAX_SELECTED,
    add_best,
    beam,
    customized,
    equal_greedy,
    global_greedy,
    token_budget,
)
from streamserve.contracts.tree import TokenTree, chain, likeliest
from streamserve.speculation.outlook import Selection
from streamserve.speculation.shapes import TreeShape
from tests.conftest import Scale
from tests.speculation.strategies import connected, expected, subtrees, trees

forests = st.lists(trees(), min_size=1, max_size=4)


def random_tree(rng: random.Random) -> TokenTree:
    size = rng.randint(1, 6)
    parents = [-1, *(rng.randrange(node) for node in range(1, size))]
    accept = [1.0]
    for node in range(1, size):
        accept.append(accept[parents[node]] * rng.choice((0.0, 0.25, 0.5, 1.0, rng.random())))
    return TokenTree(tuple(range(size)), tuple(parents), (1.0,) * size, tuple(accept))


def optimal(trees: Sequence[TokenTree], requirements: Sequence[float], budget: int) -> Selection | None:
    """Run Algorithm 1: return trees of at most `budget` nodes in all with the most expected tokens, such that
    each tree reaches its requirement A_i. None (INVALID) if there are none. The budget includes the roots, as
    in equation 1; the algorithm as published omits them."""
    left = budget - len(trees)
    if left < 0:
        return None
    selected: Selection = [[0] for _ in trees]
    for tree, requirement, nodes in zip(trees, requirements, selected, strict=True):
        expected, ranked = 1.0, likeliest(tree)
        while expected < requirement:
            node = next(ranked, None)
            if node is None or not left:
                return None
            nodes.append(node)
            expected += tree.accept[node]
            left -= 1
    return add_best(trees, selected, left)


def brute_force(forest, requirements, budget) -> float | None:
    """Return the largest number of expected tokens of at most `budget` nodes that meet every requirement;
    None if no choice does."""
    totals = [
        sum(expected(tree, nodes) for tree, nodes in zip(forest, selected, strict=True))
        for selected in product(*map(subtrees, forest))
        if sum(map(len, selected)) <= budget
        and all(
            expected(tree, nodes) >= requirement
            for tree, nodes, requirement in zip(forest, selected, requirements, strict=True)
        )
    ]
    return max(totals, default=None)


def test_algorithm_1_is_optimal_and_invalid_exactly_when_nothing_is_feasible(scale: Scale, record) -> None:
    rng, cases, invalid = random.Random(scale.seed), scale.pick(50, 1500), 0
    for _ in range(cases):
        forest = [random_tree(rng) for _ in range(rng.randint(1, 3))]
        # Sums of the same numbers in another order differ in their last bit, so requirements are never equal
        # to such sums.
        requirements = [rng.choice((-inf, 0.0, rng.uniform(0.5, 4.0))) for _ in forest]
        budget = rng.randint(0, 12)
        best, result = brute_force(forest, requirements, budget), optimal(forest, requirements, budget)
        if best is None or result is None:
            assert best is None
            assert result is None
            invalid += 1
            continue
        assert sum(map(len, result)) <= budget
        for tree, nodes, requirement in zip(forest, result, requirements, strict=True):
            assert connected(tree, nodes)
            assert expected(tree, nodes) >= requirement - 1e-9
        total = sum(expected(tree, nodes) for tree, nodes in zip(forest, result, strict=True))
        assert abs(total - best) < 1e-9
    assert 0 < invalid < cases
    record(cases=cases, invalid=invalid, seed=scale.seed)


@given(forests, st.integers(0, 20), st.data())
def test_selections_are_connected_and_within_the_budget(forest, left, data) -> None:
    requirements = [data.draw(st.floats(-5, 10)) for _ in forest]
    for selected in (
        customized(forest, requirements, left), equal_greedy(forest, left), global_greedy(forest, left)
    ):  # fmt: skip
        assert all(connected(tree, nodes) for tree, nodes in zip(forest, selected, strict=True))
        assert sum(len(nodes) - 1 for nodes in selected) <= left
    as_published = customized(forest, requirements, left, as_published=True)
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, as_published, strict=True))
    assert sum(len(nodes) - 1 for nodes in as_published) <= left + 1, (
        "the published algorithm spends one more than the budget"
    )


@given(forests, st.integers(0, 20), st.floats(0, 8), st.floats(0, 8))
def test_a_higher_requirement_never_gets_less(forest, left, requirement, increase) -> None:
    requirements = [0.0] * len(forest)
    before = customized(forest, [requirement, *requirements[1:]], left)
    after = customized(forest, [requirement + increase, *requirements[1:]], left)
    assert expected(forest[0], after[0]) >= expected(forest[0], before[0]) - 1e-9


def test_algorithm_2_is_optimal_where_algorithm_1_is_valid_and_nothing_is_capped() -> None:
    forest = [chain((1, 2, 3), (1.0, 0.5, 0.25)), chain((1, 2, 3), (1.0, 0.9, 0.8))]
    assert customized(forest, [1.6, -inf], 3) == optimal(forest, [1.6, -inf], 5) == [[0, 1, 2], [0, 1]]


def test_the_highest_requirement_comes_first_and_no_tree_exceeds_n_max() -> None:
    long = chain(tuple(range(30)), tuple(0.99**n for n in range(30)))
    selected = customized([long, long], [5.0, 100.0], 20)
    assert [len(nodes) for nodes in selected] == [6, 16]
    assert len(selected[1]) == MAX_SELECTED


def test_as_published_counts_a_node_as_if_its_parent_were_certain() -> None:
    tree = chain((1, 2, 3, 4), (1.0, 0.5, 0.25, 0.125))
    other = chain((1, 2), (1.0, 0.4))
    assert customized([tree, other], [1.7, -inf], 3) == [[0, 1, 2], [0, 1]]
    assert customized([tree, other], [1.7, -inf], 2, as_published=True) == [[0, 1, 2], [0, 1]]


def test_equal_parts_go_unused_where_a_tree_is_small() -> None:
    assert equal_greedy([chain((1,)), chain((1, 2, 3, 4))], 4) == [[0], [0, 1, 2]]


def test_the_best_nodes_of_all_may_be_of_one_request() -> None:
    forest = [chain((1, 2), (1.0, 0.1)), chain((1, 2, 3), (1.0, 0.9, 0.8))]
    assert global_greedy(forest, 2) == [[0], [0, 1, 2]]


def test_the_budget_is_the_ridge_point_of_a_roofline() -> None:
    assert token_budget(lambda tokens: max(1.0, tokens / 156)) == 156
    assert token_budget(lambda tokens: 1.0 + tokens / 13) == 14
    assert token_budget(lambda tokens: 1.0) == 512


def test_beams_shrink_as_requests_increase() -> None:
    assert beam(156, 4) == TreeShape(8, 4)
    assert beam(16, 5) == TreeShape(4, 3)
    assert beam(13, 20) == TreeShape(1, 1)
