"""A step's budget goes first to each request's first token, then to whole trees, then to longer chunks, and
is never exceeded."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.tree import chain
from streamserve.scheduling.budget import divide


def test_one_token_for_each_request_comes_before_trees_and_chunks() -> None:
    tree = chain([1, 2, 3])
    assert divide(10, [1, 8], [1, 1], [tree, None]) == [(1, tree), (7, None)]
    assert divide(4, [1, 8], [1, 1], [tree, None]) == [(1, tree), (1, None)]
    assert divide(3, [1, 8], [1, 1], [tree, None]) == [(1, None), (2, None)]


def test_a_tree_needs_the_last_token_before_it() -> None:
    assert divide(5, [4, 1], [1, 1], [chain([1, 2, 3]), None]) == [(4, None), (1, None)]


def test_what_is_due_comes_before_trees() -> None:
    tree = chain([1, 2, 3])
    assert divide(10, [1, 9], [1, 7], [tree, None]) == [(1, tree), (7, None)]
    assert divide(10, [1, 9], [1, 8], [tree, None]) == [(1, None), (9, None)]


counts = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 6))


@given(st.integers(1, 40), st.lists(counts, max_size=8))
def test_the_budget_holds_and_is_used(budget: int, requested: list[tuple[int, int, int]]) -> None:
    limits, left = [], budget
    for limit, _, _ in requested:  # the scheduler never proposes more than the budget
        limits.append(min(limit, left))
        left -= limits[-1]
    due = [minimum for _, minimum, _ in requested]
    trees = [
        chain(range(nodes + 1)) if nodes and limit else None
        for limit, (_, _, nodes) in zip(limits, requested, strict=True)
    ]
    divided = divide(budget, limits, due, trees)
    query_tokens = [chunk + (len(tree) - 1 if tree else 0) for chunk, tree in divided]
    assert sum(query_tokens) <= budget
    for limit, minimum, (chunk, tree) in zip(limits, due, divided, strict=True):
        assert min(limit, max(minimum, 1)) <= chunk <= limit
        assert tree is None or chunk == limit
    if all(tree is None for tree in trees):
        assert [chunk for chunk, _ in divided] == limits
