"""Goodput-optimal speculation against brute force, and its guards."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from streamserve.policy.goodput import PLAIN, SLOWEST, Shape, best_shape, expected_tokens, select
from streamserve.policy.tree import TokenTree

curves = st.lists(st.floats(0.0, 0.5), min_size=80, max_size=80).map(
    lambda steps: [1.0 + sum(steps[:n]) for n in range(81)]
)


@st.composite
def trees(draw, most: int = 6) -> TokenTree:
    size = draw(st.integers(1, most))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    accept = [1.0]
    for node in range(1, size):
        accept.append(accept[parents[node]] * draw(st.floats(0.0, 1.0)))
    return TokenTree(tuple(range(size)), tuple(parents), (1.0,) * size, tuple(accept))


def connected(tree: TokenTree, nodes: list[int]) -> bool:
    return nodes[0] == 0 and all(tree.parents[node] in nodes for node in nodes[1:])


def rate(forest, kept, plain, spent, curve) -> float:
    guessed = sum(len(nodes) - 1 for nodes in kept)
    expected = sum(sum(tree.accept[n] for n in nodes) for tree, nodes in zip(forest, kept, strict=True))
    return expected / (spent + curve[plain + guessed])


@given(st.lists(trees(4), min_size=1, max_size=3), curves, st.floats(0, 3), st.integers(0, 12))
def test_the_selection_is_the_best_of_all_connected_ones(forest, curve, spent, budget):
    plain = len(forest)
    kept = select(forest, plain, plain, spent, lambda rows: curve[rows], budget)
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, kept, strict=True))
    assert sum(len(nodes) - 1 for nodes in kept) <= budget
    options = [
        [
            [0, *(n for n in range(1, len(tree)) if mask >> n & 1)]
            for mask in range(0, 1 << len(tree), 2)
            if connected(tree, [0, *(n for n in range(1, len(tree)) if mask >> n & 1)])
        ]
        for tree in forest
    ]
    best = max(
        rate(forest, one, plain, spent, curve)
        for one in product(*options)
        if sum(len(nodes) - 1 for nodes in one) <= budget
    )
    assert rate(forest, kept, plain, spent, curve) >= best - 1e-9


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.integers(1, 8))
def test_requests_without_guesses_keep_their_speed(forest, curve, others):
    plain = len(forest) + others
    kept = select(forest, plain, plain, 0.0, lambda rows: curve[rows], 64)
    guessed = sum(len(nodes) - 1 for nodes in kept)
    assert curve[plain + guessed] <= curve[plain] / SLOWEST + 1e-12


def test_a_staircase_is_crossed_when_the_next_landing_pays():
    """The second node alone does not pay, but with the third and fourth on the same stair it does."""
    curve = lambda rows: 1.0 if rows <= 2 else 1.5  # noqa: E731
    tree = TokenTree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3), (1.0,) * 5, (1.0, 0.9, 0.89, 0.88, 0.87))
    assert select([tree], 1, 1, 0.0, curve, 8) == [[0, 1, 2, 3, 4]]


def test_prompt_chunks_in_the_step_do_not_make_guesses_cheap():
    """A hopeless guess is as little worth beside a long chunk as alone."""
    tree = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.05))
    curve = lambda rows: 1.0 + rows / 10  # noqa: E731
    assert select([tree], 1, 1, 0.0, curve, 8) == [[0]]
    assert select([tree], 301, 1, 0.0, curve, 8) == [[0]]
    assert best_shape(1, 300, [0.05], curve, lambda shape: 0.0, 8, 8) == PLAIN


def test_nothing_is_drafted_where_rows_cost_what_they_cost_alone():
    assert best_shape(8, 0, [0.9], lambda rows: rows * 1.0, lambda shape: 0.0, 8, 8) == PLAIN


def test_a_free_row_is_always_taken():
    shape = best_shape(1, 0, [0.8, 0.9], lambda rows: 1.0 if rows <= 6 else 9.0, lambda shape: 0.0, 8, 16)
    assert shape == Shape(5, 1)


def test_an_expensive_draft_is_not_paid_for():
    assert best_shape(1, 0, [0.8], lambda rows: 1.0, lambda shape: shape.depth * 1.0, 8, 8) == PLAIN


@given(st.floats(0, 1), st.integers(0, 20))
def test_expected_tokens_are_the_sum_of_path_probabilities(cover, depth):
    assert abs(expected_tokens(cover, depth) - sum(cover**level for level in range(depth + 1))) < 1e-6
