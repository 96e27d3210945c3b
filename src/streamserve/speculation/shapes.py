"""The shape of a draft tree: its depth and width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

Seconds = Callable[[int], float]
"""Seconds of a step with so many query tokens."""


@dataclass(frozen=True)
class Shape:
    """Number of levels, and of nodes a level (the root not counted). With an `expansion` every node of level
    l has `expansion[l]` children instead, whatever their probabilities; `width` is then that of the widest
    level."""

    depth: int
    width: int
    expansion: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """Total number of nodes."""
        if self.expansion:
            return sum(prod(self.expansion[: level + 1]) for level in range(self.depth))
        return self.depth * self.width


PLAIN = Shape(0, 0)


def fit(shape: Shape, depth: int, nodes: int) -> Shape:
    """Return the shape, truncated to at most so many levels and nodes."""
    levels = min(shape.depth, depth)
    if shape.expansion:
        while Shape(levels, shape.width, shape.expansion).nodes > nodes:
            levels -= 1
        return Shape(levels, shape.width, shape.expansion) if levels > 0 else PLAIN
    if levels * shape.width <= nodes:
        return Shape(levels, shape.width) if levels > 0 else PLAIN
    if nodes >= shape.width:
        return Shape(nodes // shape.width, shape.width)
    return Shape(1, nodes) if nodes > 0 else PLAIN


def expected_tokens(acceptance: float, depth: int) -> float:
    """Return the tokens that a step yields for one request if each level has the next token with probability
    `acceptance`: the accepted ones and the target's own, (1 - a^(d+1)) / (1 - a)."""
    return depth + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


def expected_by_level(level_acceptance: Sequence[float], depth: int) -> float:
    """Return the same where `level_acceptance[l]` is the probability at level l, given that all above it were
    accepted; the last one holds for all deeper levels."""
    expected = reached = 1.0
    for level in range(depth):
        reached *= level_acceptance[min(level, len(level_acceptance) - 1)]
        expected += reached
    return expected
