"""How likely guesses are accepted: learned online from what became of earlier ones.

A drafter gives each guess a feature between 0 and 1 that grows with its chances (a softmax value, a gap
between perturbed scores), but says nothing about the chances themselves. So guesses are counted in bins of
it, apart for greedy and sampled requests and for a node's best guess and its siblings, and the frequencies,
made monotone, are the calibrated *conditional* acceptance: given that the parent was accepted.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from streamserve.policy.tree import TokenTree

BINS = 12
PRIOR = 6.0
"""Observations that the prior of a bin counts for."""
MEMORY = 2000.0
"""Observations of a bin after which older ones fade, so that a change of traffic is noticed."""

Table = NDArray[np.float64]


class Acceptance:
    """Counts of one engine's guesses by [class, bin]; a class is (sampled?, sibling?)."""

    def __init__(self) -> None:
        centre = (np.arange(BINS) + 0.5) / BINS
        self.tested: Table = np.full((4, BINS), PRIOR)
        self.accepted: Table = PRIOR * np.stack([centre, centre / 2, centre, centre / 2])
        self._monotone = self._fit()
        self._stale = 0

    def calibrate(self, tree: TokenTree, sampled: bool) -> TokenTree:
        """The tree with calibrated path acceptances in place of the drafter's own."""
        first = first_children(tree)
        accept = [1.0]
        for node in range(1, len(tree)):
            kind = 2 * sampled + (not first[node])
            conditional = self._monotone[kind, _bin(tree.scores[node])]
            accept.append(accept[tree.parents[node]] * float(conditional))
        return replace(tree, accept=tuple(accept))

    def learn(self, tree: TokenTree, tokens: Sequence[int], sampled: bool) -> None:
        """Take in that the target chose `tokens`, whatever part of `tree` was verified."""
        path = tree.follow(tokens)
        reached, tested = set(path), set(path[: len(tokens)])
        first = first_children(tree)
        for node in range(1, len(tree)):
            if tree.parents[node] not in tested:
                continue  # nobody asked whether it would have been right
            kind, place = 2 * sampled + (not first[node]), _bin(tree.scores[node])
            if self.tested[kind, place] > MEMORY:
                self.tested[kind, place] /= 2
                self.accepted[kind, place] /= 2
            self.tested[kind, place] += 1
            self.accepted[kind, place] += node in reached
        self._stale += 1
        if self._stale >= 32:
            self._monotone, self._stale = self._fit(), 0

    def _fit(self) -> Table:
        return np.stack([isotonic(a / t, t) for a, t in zip(self.accepted, self.tested, strict=True)])


def first_children(tree: TokenTree) -> list[bool]:
    """Of each node: is it its parent's best guess? Drafters order children by score."""
    seen: set[int] = set()
    first = []
    for parent in tree.parents:
        first.append(parent not in seen)
        seen.add(parent)
    return first


def isotonic(values: Table, weights: Table) -> Table:
    """The non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent violators)."""
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
