"""Acceptance probabilities of draft tokens, learned online from earlier verifications.

A drafter gives each draft token a feature between 0 and 1 that grows with its acceptance (a softmax value, a
gap between perturbed scores), but not the probability itself. So draft tokens are counted in bins of the
feature, separately for greedy and sampled requests, and for a node's best child and the other children. The
frequencies, made monotone, are the calibrated *conditional* acceptance: given that the parent was accepted.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from streamserve.contracts.tree import TokenTree

BINS = 12
PRIOR = 6.0
"""Number of observations that the prior of a bin counts for."""
MEMORY = 2000.0
"""Number of observations of a bin above which its counts are halved, so that a change of traffic shows."""

Table = NDArray[np.float64]


class Acceptance:
    """Counts of one engine's draft tokens by [class, bin]. The class is 2 * sampled + sibling: whether the
    request is sampled, and whether the node is not its parent's best child."""

    def __init__(self) -> None:
        # The prior: a best child's acceptance is its feature, a sibling's is half of it.
        centre = [(bin + 0.5) / BINS for bin in range(BINS)]
        half = [share / 2 for share in centre]
        self.tested = [[PRIOR] * BINS for _ in range(4)]
        self.accepted = [[PRIOR * share for share in row] for row in (centre, half, centre, half)]
        self._monotone = self._fit()
        self._stale = 0

    def calibrate(self, tree: TokenTree, sampled: bool) -> TokenTree:
        """Return the tree with calibrated path acceptances in place of the drafter's own."""
        best, sibling = self._monotone[2 * sampled : 2 * sampled + 2]
        accept = [1.0]
        nodes = zip(tree.parents, tree.scores, first_children(tree), strict=True)
        for parent, score, first in islice(nodes, 1, None):
            accept.append(accept[parent] * (best if first else sibling)[_bin(score)])
        return TokenTree(tree.tokens, tree.parents, tree.scores, tuple(accept), tree.draws)

    def learn(self, tree: TokenTree, tokens: Sequence[int], sampled: bool) -> None:
        """Record that the target chose `tokens`. `tree` is the whole drafted tree: the target's tokens judge
        its nodes that were not selected for verification too."""
        reached = tree.follow(tokens)
        asked, first = reached[: len(tokens)], first_children(tree)
        for node, parent in enumerate(tree.parents):
            if parent not in asked:
                continue  # the parent was not accepted: no target token judges this node
            kind, place = 2 * sampled + (not first[node]), _bin(tree.scores[node])
            tested, accepted = self.tested[kind], self.accepted[kind]
            if tested[place] > MEMORY:
                tested[place] /= 2
                accepted[place] /= 2
            tested[place] += 1
            accepted[place] += node in reached
        self._stale += 1
        if self._stale >= 32:
            self._monotone, self._stale = self._fit(), 0

    def _fit(self) -> list[list[float]]:
        return [
            isotonic(np.array(accepted) / tested, np.array(tested)).tolist()
            for accepted, tested in zip(self.accepted, self.tested, strict=True)
        ]


def first_children(tree: TokenTree) -> list[bool]:
    """Return, for each node, whether it is its parent's best child. Drafters order children by score."""
    seen: set[int] = set()
    first = []
    for parent in tree.parents:
        first.append(parent not in seen)
        seen.add(parent)
    return first


def isotonic(values: Table, weights: Table) -> Table:
    """Return the non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent
    violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, members = pools.pop()
            total = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / total, total, members + pool[2])
        pools.append(pool)
    return np.concatenate([np.full(members, mean) for mean, _, members in pools])


def _bin(feature: float) -> int:
    return min(int(max(feature, 0.0) * BINS), BINS - 1)
