"""Acceptance by tree level, learned online: the statistics that shapes are chosen by before drafting."""

from collections.abc import Sequence
from itertools import accumulate

from streamserve.contracts.tree import TokenTree
from streamserve.speculation.goodput import MAX_LEVELS, WIDTHS
from streamserve.speculation.shapes import TreeShape

INITIAL_ACCEPTANCE = (0.7, 0.08, 0.04, 0.02)
"""Initial probability that a node's first, second, … candidate token is accepted."""
PRIOR_WEIGHT = 20.0
"""Number of observations that the prior of a tree level counts for: the acceptance of the level above it."""
MEMORY = 400.0
"""Number of observations of a level above which its counts are halved, so that older ones fade."""


class LevelAcceptance:
    """Counts of one engine's draft tokens by [level, rank among siblings]."""

    def __init__(self) -> None:
        self._tried = [[0.0] * len(WIDTHS) for _ in range(MAX_LEVELS)]
        self._hits = [[0.0] * len(WIDTHS) for _ in range(MAX_LEVELS)]
        self._known: list[list[float]] | None = None

    def by_width(self) -> list[list[float]]:
        """Return the acceptance by [width - 1, level]: the probability that the next token is among a node's
        best `width` candidates, given that all tokens above it were accepted. It may rise with the level: a
        text with long accepted paths is easy to draft for."""
        if self._known is None:
            prior_level, levels = list(INITIAL_ACCEPTANCE), []
            for hits, tried in zip(self._hits, self._tried, strict=True):
                prior_level = [
                    (hit + PRIOR_WEIGHT * prior) / (trials + PRIOR_WEIGHT)
                    for hit, trials, prior in zip(hits, tried, prior_level, strict=True)
                ]
                levels.append([min(total, 0.999) for total in accumulate(prior_level)])
            self._known = [list(widths) for widths in zip(*levels, strict=True)]
        return self._known

    def learn(self, tree: TokenTree, tokens: Sequence[int], requested: TreeShape) -> None:
        """Record how far the target's `tokens` follow the drafted `tree`, which was to have the shape
        `requested`. Nodes that were requested but not drafted count as not accepted."""
        path = tree.follow(tokens)
        self._known = None
        for level, parent in enumerate(path[: min(len(tokens), requested.depth, MAX_LEVELS)]):
            tried, hits = self._tried[level], self._hits[level]
            child = path[level + 1] if level + 1 < len(path) else None
            for rank in range(min(requested.width, len(WIDTHS))):
                if tried[rank] > MEMORY:
                    tried[rank] /= 2
                    hits[rank] /= 2
                tried[rank] += 1
            if child is not None:
                rank = tree.parents[:child].count(parent)  # siblings with a higher score
                if rank < len(WIDTHS):
                    hits[rank] += 1
