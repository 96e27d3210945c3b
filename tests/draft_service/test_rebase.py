"""Rebasing a tree retains the subtree that follows the tokens committed since it was drafted."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.target.rebase import rebase
from tests.speculation.strategies import trees


@given(trees(), st.data())
def test_it_retains_the_paths_that_continue(tree, data):
    node = data.draw(st.integers(0, len(tree) - 1))
    dropped = [tree.tokens[n] for n in tree.path(node)][1:]
    left = rebase(tree, dropped)
    before = {tuple(tree.tokens[n] for n in tree.path(end)[1:]) for end in range(len(tree))}
    reached = tree.follow(dropped)[-1]
    below = [end for end in range(len(tree)) if reached in tree.path(end) and end != reached]
    expected = {tuple(tree.tokens[n] for n in tree.path(end)[1:])[len(dropped) :] for end in below}
    if left is None:
        assert not expected
        return
    assert left.tokens[0] == tree.tokens[reached]
    paths = {tuple(left.tokens[n] for n in left.path(end)[1:]) for end in range(1, len(left))}
    assert paths == expected
    assert {(*dropped, *path) for path in paths} <= before


@given(trees(), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_tokens_outside_of_the_tree_leave_nothing(tree, tokens):
    if len(tree.follow(tokens)) <= len(tokens):
        assert rebase(tree, tokens) is None
