"""A step's budget: everyone first, then whole trees, then longer chunks, never too much."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.budget import divide
from streamserve.speculation.tree import chain


def test_one_token_for_everyone_comes_before_trees_and_chunks() -> None:
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
def test_the_budget_holds_and_is_used(budget: int, wanted: list[tuple[int, int, int]]) -> None:
    rooms, left = [], budget
    for room, _, _ in wanted:  # the scheduler never proposes more than the budget
        rooms.append(min(room, left))
        left -= rooms[-1]
    due = [least for _, least, _ in wanted]
    trees = [
        chain(range(nodes + 1)) if nodes and room else None
        for room, (_, _, nodes) in zip(rooms, wanted, strict=True)
    ]
    divided = divide(budget, rooms, due, trees)
    rows = [chunk + (len(tree) - 1 if tree else 0) for chunk, tree in divided]
    assert sum(rows) <= budget
    for room, least, (chunk, tree) in zip(rooms, due, divided, strict=True):
        assert min(room, max(least, 1)) <= chunk <= room
        assert tree is None or chunk == room
    if all(tree is None for tree in trees):
        assert [chunk for chunk, _ in divided] == rooms
