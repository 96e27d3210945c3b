"""AdaServe: token trees that first meet each request's latency target, then maximise expected tokens.

The budget B is the number of query tokens that a pass takes before it turns compute-bound; the roots, one
token for each decoding request, come out of it first. A tree's expected tokens are the sum of f(v) over its
nodes, f being the probability that the whole path to a node is accepted, and 1 for the root.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from streamserve.speculation.shapes import Seconds, Shape
from streamserve.speculation.slo import Need
from streamserve.speculation.tree import TokenTree

MOST_DEPTH, MOST_WIDTH = 8, 4
"""D_max and W_max of Algorithm 2."""
MOST_PICKED = 16
"""n_max: the most nodes, the root included, that the selection for targets gives one request."""
MARGINAL = (256, 512)
"""Query tokens between which a pass is taken to be compute-bound, to read off the cost of one more."""

Kept = list[list[int]]
"""For each tree the nodes to verify, ascending, with the root."""


def token_budget(step: Seconds) -> int:
    """Return B = T(1) / marginal cost of a token: on a roofline, the number of query tokens at its ridge
    point."""
    low, high = MARGINAL
    marginal = (step(high) - step(low)) / (high - low)
    return max(1, min(round(step(1) / marginal), high)) if marginal > 0 else high


def beam(budget: int, requests: int) -> Shape:
    """Return the shape of the candidate trees for so many requests: equations 8 and 9."""
    return Shape(
        max(1, min(MOST_DEPTH, ceil(budget / requests))), max(1, min(MOST_WIDTH, budget // requests))
    )


def optimal(trees: Sequence[TokenTree], needs: Sequence[float], budget: int) -> Kept | None:
    """Run Algorithm 1: return the trees of at most `budget` nodes in all (as published it omits the roots,
    equation 1 does not) with the most expected tokens among those where each reaches its need A_i. None,
    INVALID, if there are none."""
    left = budget - len(trees)
    if left < 0:
        return None
    kept: Kept = [[0] for _ in trees]
    for tree, need, nodes in zip(trees, needs, kept, strict=True):
        expected, ranked = 1.0, likeliest(tree)
        while expected < need:
            node = next(ranked, None)
            if node is None or not left:
                return None
            nodes.append(node)
            expected += tree.accept[node]
            left -= 1
    return add_best(trees, kept, left)


def customized(trees: Sequence[TokenTree], needs: Sequence[float], left: int, printed: bool = False) -> Kept:
    """Run Algorithm 2's selection: in descending need A, nodes until a request's tree reaches it (or the most
    that its depth can yield, or n_max nodes), then the best of all. `left` is the budget after all roots.

    `printed` follows the algorithm as published: both passes continue while the budget is *not below* zero,
    which spends one too many, and a node counts with the probability given its parent, as if the parent were
    certain.
    """
    left += printed and left >= 0
    kept: Kept = [[0] for _ in trees]
    for number in sorted(range(len(trees)), key=lambda number: (-needs[number], number)):
        tree, nodes = trees[number], kept[number]
        wanted = min(needs[number], max(tree.depths()) + 1.0)
        expected, ranked = 1.0, likeliest(tree)
        while expected < wanted and len(nodes) < MOST_PICKED and left > 0:
            node = next(ranked, None)
            if node is None:
                break
            nodes.append(node)
            expected += _conditional(tree, node) if printed else tree.accept[node]
            left -= 1
    return add_best(trees, kept, left)


def equal_greedy(trees: Sequence[TokenTree], left: int) -> Kept:
    """Divide the budget after the roots into even parts, each spent on that request's best nodes: EAGLE-2
    with a budget."""
    if left <= 0:
        return [[0] for _ in trees]
    share, more = divmod(left, len(trees))
    return [
        sorted([0, *_first(likeliest(tree), share + (number < more))]) for number, tree in enumerate(trees)
    ]


def global_greedy(trees: Sequence[TokenTree], left: int) -> Kept:
    """Spend the budget after the roots on the best nodes of all, whatever the needs."""
    return add_best(trees, [[0] for _ in trees], left)


def needed(needs: Iterable[Need], seconds: float) -> list[float]:
    """Return A_i of every request for a step of `seconds`."""
    return [need.tokens(seconds) for need in needs]


def likeliest(tree: TokenTree) -> Iterator[int]:
    """Return all nodes but the root, the likeliest path first and a parent always before its children: ties
    are in node order, where parents come first."""
    return iter(sorted(range(1, len(tree)), key=lambda node: (-tree.accept[node], node)))


def add_best(trees: Sequence[TokenTree], kept: Kept, left: int) -> Kept:
    """Return `kept` with the `left` best of the other nodes added; ascending."""
    taken = [set(nodes) for nodes in kept]
    rest = (
        (-tree.accept[node], number, node)
        for number, tree in enumerate(trees)
        for node in range(1, len(tree))
        if node not in taken[number]
    )
    for _, number, node in heapq.nsmallest(max(left, 0), rest):
        kept[number].append(node)
    return [sorted(nodes) for nodes in kept]


def _conditional(tree: TokenTree, node: int) -> float:
    above = tree.accept[tree.parents[node]]
    return tree.accept[node] / above if above > 0 else 0.0


def _first(nodes: Iterator[int], count: int) -> list[int]:
    return [node for node, _ in zip(nodes, range(count), strict=False)]
