"""Random trees, costs and latency requirements."""

from itertools import accumulate

from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

curves = st.lists(st.floats(0.0, 0.5), min_size=80, max_size=80).map(
    lambda steps: list(accumulate(steps + [steps[-1]] * 440, initial=1.0))
)
"""Cost curves: seconds by query tokens, which never decrease."""

targets = st.builds(
    LatencyRequirement, tpot=st.floats(0.1, 20), decode_seconds=st.floats(0, 50), decoded=st.integers(0, 50)
)
requirements = st.one_of(st.just(NO_REQUIREMENT), targets)


@st.composite
def trees(draw, max_size: int = 6) -> TokenTree:
    size = draw(st.integers(1, max_size))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    accept = [1.0]
    for node in range(1, size):
        accept.append(accept[parents[node]] * draw(st.floats(0.0, 1.0)))
    return TokenTree(tuple(range(size)), tuple(parents), (1.0,) * size, tuple(accept))


def connected(tree: TokenTree, nodes: list[int]) -> bool:
    """Return whether `nodes` ascend, begin with the root, and contain every node's parent."""
    return (
        nodes[0] == 0
        and nodes == sorted(set(nodes))
        and all(tree.parents[node] in nodes for node in nodes[1:])
    )


def expected(tree: TokenTree, nodes: list[int]) -> float:
    return sum(tree.accept[node] for node in nodes)


def subtrees(tree: TokenTree) -> list[list[int]]:
    """Return all connected subtrees that contain the root."""
    options = (
        [0, *(n for n in range(1, len(tree)) if mask >> n & 1)] for mask in range(0, 1 << len(tree), 2)
    )
    return [nodes for nodes in options if connected(tree, nodes)]
