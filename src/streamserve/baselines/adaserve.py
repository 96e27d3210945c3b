"""AdaServe: token trees that first meet each request's latency target, and then maximize expected tokens.

The budget B is the number of query tokens at which a pass becomes compute-bound. The roots, one token for
each decoding request, are part of it. A tree's expected tokens are the sum of f(v) over its nodes v: f(v) is
the probability that the whole path to v is accepted, and 1 for the root.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from streamserve.contracts.tree import TokenTree, likeliest
from streamserve.speculation.outlook import DraftedStep, Outlook, Selection
from streamserve.speculation.policies import SpeculationPolicy, stateless
from streamserve.speculation.shapes import Seconds, TreeShape
from streamserve.speculation.slo import LatencyRequirement

MAX_DEPTH, MAX_WIDTH = 8, 4
"""D_max and W_max of Algorithm 2."""
MAX_SELECTED = 16
"""n_max: the maximum number of nodes, including the root, that the selection for latency targets gives one
request."""
MARGINAL = (256, 512)
"""Numbers of query tokens at which a pass is assumed to be compute-bound. The cost of one more token is the
slope between them."""


def token_budget(step: Seconds) -> int:
    """Return B = T(1) / marginal cost of a token. On a roofline, this is the number of query tokens at its
    ridge point."""
    low, high = MARGINAL
    marginal = (step(high) - step(low)) / (high - low)
    return max(1, min(round(step(1) / marginal), high)) if marginal > 0 else high


def beam(budget: int, requests: int) -> TreeShape:
    """Return the shape of the candidate trees for `requests` requests (equations 8 and 9)."""
    return TreeShape(
        max(1, min(MAX_DEPTH, ceil(budget / requests))), max(1, min(MAX_WIDTH, budget // requests))
    )


def customized(
    trees: Sequence[TokenTree], requirements: Sequence[float], left: int, as_published: bool = False
) -> Selection:
    """Run the selection of Algorithm 2. First, in descending order of the requirement A, add nodes to a
    request's tree until it reaches A, the maximum that its depth can yield, or n_max nodes. Then add the best
    nodes of all trees. `left` is the budget after all roots.

    With `as_published`, do as the paper says. Both passes continue while the budget is *not below* zero,
    which spends one node too many. And a node counts with its probability given its parent, as if the parent
    were certain.
    """
    left += as_published and left >= 0
    selected: Selection = [[0] for _ in trees]
    for number in sorted(range(len(trees)), key=lambda number: (-requirements[number], number)):
        tree, nodes = trees[number], selected[number]
        required = min(requirements[number], max(tree.depths()) + 1.0)
        expected, ranked = 1.0, likeliest(tree)
        while expected < required and len(nodes) < MAX_SELECTED and left > 0:
            node = next(ranked, None)
            if node is None:
                break
            nodes.append(node)
            expected += _conditional(tree, node) if as_published else tree.accept[node]
            left -= 1
    return add_best(trees, selected, left)


def equal_greedy(trees: Sequence[TokenTree], left: int) -> Selection:
    """Divide the budget after the roots into even parts; spend each on the best nodes of one request: EAGLE-2
    with a budget."""
    if left <= 0:
        return [[0] for _ in trees]
    share, more = divmod(left, len(trees))
    return [
        sorted([0, *_first(likeliest(tree), share + (number < more))]) for number, tree in enumerate(trees)
    ]


def global_greedy(trees: Sequence[TokenTree], left: int) -> Selection:
    """Spend the budget after the roots on the best nodes of all trees, without regard to the requirements."""
    return add_best(trees, [[0] for _ in trees], left)


def required_tokens(requirements: Iterable[LatencyRequirement], seconds: float) -> list[float]:
    """Return, for each request, the number of tokens A_i that its latency target requires of a step of
    `seconds`."""
    return [requirement.tokens(seconds) for requirement in requirements]


def add_best(trees: Sequence[TokenTree], selected: Selection, left: int) -> Selection:
    """Add the best nodes outside `selected`, at most `left`, to the selected ones; return all in ascending
    order."""
    taken = [set(nodes) for nodes in selected]
    rest = (
        (-tree.accept[node], number, node)
        for number, tree in enumerate(trees)
        for node in range(1, len(tree))
        if node not in taken[number]
    )
    for _, number, node in heapq.nsmallest(max(left, 0), rest):
        selected[number].append(node)
    return [sorted(nodes) for nodes in selected]


def _conditional(tree: TokenTree, node: int) -> float:
    above = tree.accept[tree.parents[node]]
    return tree.accept[node] / above if above > 0 else 0.0


def _first(nodes: Iterator[int], count: int) -> list[int]:
    return [node for node, _ in zip(nodes, range(count), strict=False)]


def shapes(outlook: Outlook) -> list[TreeShape]:
    """Return the shape of the candidate trees, one equal shape for each request."""
    count = len(outlook.candidates)
    return [beam(token_budget(outlook.step), max(count + len(outlook.undrafted), 1))] * count


def _budget(drafted: DraftedStep) -> int:
    """Return the draft tokens that the budget leaves after the roots."""
    return min(token_budget(drafted.step) - drafted.decoding, drafted.budget)


def select(drafted: DraftedStep) -> Selection:
    """Return the nodes of each tree to verify, by Algorithm 2 with its faults corrected."""
    seconds = drafted.step(token_budget(drafted.step))
    return customized(drafted.trees, required_tokens(drafted.requirements, seconds), _budget(drafted))


def select_as_published(drafted: DraftedStep) -> Selection:
    """Return the nodes of each tree to verify, by Algorithm 2 as published. Its one node too many still fits
    the step."""
    budget = token_budget(drafted.step)
    left = min(budget - drafted.decoding, drafted.budget - 1)
    requirements = required_tokens(drafted.requirements, drafted.step(budget))
    return customized(drafted.trees, requirements, left, as_published=True)


_SHAPES = stateless(shapes)
POLICIES = (
    SpeculationPolicy("adaserve", _SHAPES, select),
    SpeculationPolicy("adaserve-as-published", _SHAPES, select_as_published, calibrated=False),
    SpeculationPolicy("equal-greedy", _SHAPES, lambda drafted: equal_greedy(drafted.trees, _budget(drafted))),
    SpeculationPolicy(
        "global-greedy", _SHAPES, lambda drafted: global_greedy(drafted.trees, _budget(drafted))
    ),
)
