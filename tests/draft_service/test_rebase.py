"""What is left of a tree is what it said behind the tokens that were gone since."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.target.rebase import rebase
from tests.speculation.strategies import trees


@given(trees(), st.data())
def test_it_keeps_the_paths_that_go_on(tree, data):
    node = data.draw(st.integers(0, len(tree) - 1))
    gone = [tree.tokens[n] for n in tree.path(node)][1:]
    left = rebase(tree, gone)
    before = {tuple(tree.tokens[n] for n in tree.path(end)[1:]) for end in range(len(tree))}
    reached = tree.follow(gone)[-1]
    below = [end for end in range(len(tree)) if reached in tree.path(end) and end != reached]
    expected = {tuple(tree.tokens[n] for n in tree.path(end)[1:])[len(gone) :] for end in below}
    if left is None:
        assert not expected
        return
    assert left.tokens[0] == tree.tokens[reached]
    paths = {tuple(left.tokens[n] for n in left.path(end)[1:]) for end in range(1, len(left))}
    assert paths == expected
    assert {(*gone, *path) for path in paths} <= before


@given(trees(), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_what_it_did_not_guess_leaves_nothing(tree, tokens):
    if len(tree.follow(tokens)) <= len(tokens):
        assert rebase(tree, tokens) is None
