"""Token trees have parents before children, a chain is a tree, and a subtree retains its paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree, chain, root

TREE = TokenTree((7, 3, 4, 9), (-1, 0, 0, 1), (0.0,) * 4, (1.0, 0.8, 0.5, 0.4))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(1, 12))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    accept = [1.0]
    for parent in parents[1:]:
        accept.append(accept[parent] * draw(st.floats(0, 1)))
    tokens = tuple(draw(st.integers(0, 5)) for _ in range(size))
    return TokenTree(tokens, parents, (0.0,) * size, tuple(accept)).check()


def test_depths_and_paths_follow_the_parents() -> None:
    assert TREE.depths() == [0, 1, 1, 2]
    assert TREE.path(3) == [0, 1, 3]
    assert TREE.child(0, 4) == 2
    assert TREE.child(1, 4) is None


def test_a_chain_and_a_root_are_trees() -> None:
    assert chain([1, 2, 3]).parents == (-1, 0, 1)
    assert root(5) == chain([5])


@pytest.mark.parametrize(
    ("tokens", "parents", "accept"),
    [
        ((), (), ()),
        ((1, 2), (-1,), (1.0, 1.0)),
        ((1, 2), (0, 0), (1.0, 1.0)),
        ((1, 2, 3), (-1, 2, 0), (1.0, 1.0, 1.0)),
        ((1, 2), (-1, 0), (0.5, 0.6)),
    ],
)
def test_arrays_that_form_no_tree_are_refused(tokens, parents, accept) -> None:
    with pytest.raises(ValueError, match=r"tree|parent"):
        TokenTree(tokens, parents, (0.0,) * len(tokens), accept).check()


@given(trees(), st.data())
def test_a_subtree_keeps_the_paths_of_its_nodes(tree: TokenTree, data: st.DataObject) -> None:
    nodes = {0}
    for node in data.draw(st.lists(st.integers(0, len(tree) - 1))):
        nodes |= set(tree.path(node))
    retained = sorted(nodes)
    subtree = tree.keep(retained)
    for new, old in enumerate(retained):
        assert [subtree.tokens[i] for i in subtree.path(new)] == [tree.tokens[i] for i in tree.path(old)]
        assert subtree.accept[new] == tree.accept[old]
