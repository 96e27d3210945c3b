"""A layout has the right rows, positions and slots, and refuses spans that would corrupt the cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree, root
from streamserve.execution.model.layout import ancestors, lay_out

FORK = TokenTree((7, 3, 4, 9), (-1, 0, 0, 1), (0.0,) * 4, (1.0,) * 4)
CHUNK = Span(1, 3, [20, 21, 22], blocks=[9, 4])
TREE = Span(2, 5, [6, 7], blocks=[1, 0, 8], tree=FORK, choices=(0,))


def test_rows_are_consecutive_with_tree_nodes_at_their_depth():
    layout = lay_out([CHUNK, TREE], block_size=4)
    assert layout.tokens.tolist() == [20, 21, 22, 6, 7, 3, 4, 9]
    assert layout.positions.tolist() == [3, 4, 5, 5, 6, 7, 7, 8]
    assert layout.slots.tolist() == [9 * 4 + 3, 4 * 4, 4 * 4 + 1, 1, 2, 3, 8 * 4, 8 * 4 + 1]
    assert [part.offset for part in layout.parts] == [0, 3]


def test_rows_whose_kv_is_there_are_skipped():
    layout = lay_out([CHUNK, replace(TREE, skip=3), replace(TREE, skip=1)], block_size=4)
    assert layout.tokens.tolist() == [20, 21, 22, 4, 9, 7, 3, 4, 9]
    assert layout.positions.tolist() == [3, 4, 5, 7, 8, 6, 7, 7, 8]
    assert [part.offset for part in layout.parts] == [0, 3, 5]
    assert [part.slots.tolist() for part in layout.parts[1:]] == [[32, 33], [2, 3, 32, 33]]


def test_only_tree_rows_need_logits():
    layout = lay_out([CHUNK, TREE], block_size=4)
    assert layout.sampled_rows() == [4, 5, 6, 7]
    assert [layout.tokens[row] for row in layout.sampled_rows()] == list(FORK.tokens)


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (replace(CHUNK, tokens=[]), "no tokens"),
        (replace(CHUNK, blocks=[9]), "cannot hold"),
        (replace(TREE, tokens=[6, 8]), "root is not"),
        (replace(TREE, choices=(0, 1)), "fork"),
        (replace(TREE, skip=5), "skips 5 of 5"),
    ],
)
def test_a_span_that_contradicts_itself_is_refused(span, reason):
    with pytest.raises(ValueError, match=reason):
        lay_out([span], block_size=4)


def test_choices_may_fork_where_nothing_is_drafted():
    span = replace(TREE, tree=root(7), choices=(0, 1, 2))
    assert lay_out([span], block_size=4).sampled_rows() == [1]


@given(st.data())
def test_ancestors_are_the_nodes_of_the_path(data):
    size = data.draw(st.integers(1, 12))
    parents = (-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, size)))
    tree = TokenTree((0,) * size, parents, (0.0,) * size, (1.0,) * size)
    matrix = ancestors(tree)
    for node in range(size):
        assert matrix[node].nonzero()[0].tolist() == tree.path(node)
