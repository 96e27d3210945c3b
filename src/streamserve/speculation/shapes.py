"""The shape of a draft tree: its depth and width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

Seconds = Callable[[int], float]
"""Seconds of a step, by its number of query tokens."""


@dataclass(frozen=True)
class TreeShape:
    """The shape of a draft tree: `depth` levels below the root, and `width` nodes a level. With an
    `expansion` every node of level l has `expansion[l]` children instead, whatever their probabilities;
    `width` is then the number of nodes of the widest level."""

    depth: int
    width: int
    expansion: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """Total number of nodes without the root: draft tokens."""
        if self.expansion:
            return sum(prod(self.expansion[: level + 1]) for level in range(self.depth))
        return self.depth * self.width


PLAIN = TreeShape(0, 0)
"""The shape without draft tokens."""


def fit(shape: TreeShape, depth: int, nodes: int) -> TreeShape:
    """Return the shape, truncated to at most `depth` levels and `nodes` nodes."""
    levels = min(shape.depth, depth)
    if shape.expansion:
        while TreeShape(levels, shape.width, shape.expansion).nodes > nodes:
            levels -= 1
        return TreeShape(levels, shape.width, shape.expansion) if levels > 0 else PLAIN
    if levels * shape.width <= nodes:
        return TreeShape(levels, shape.width) if levels > 0 else PLAIN
    if nodes >= shape.width:
        return TreeShape(nodes // shape.width, shape.width)
    return TreeShape(1, nodes) if nodes > 0 else PLAIN


def expected_tokens(acceptance: float, depth: int) -> float:
    """Return the expected tokens of a step for one request whose draft tree has `depth` levels: the accepted
    draft tokens, and the token that the target adds. Each level has the next token with probability a
    (`acceptance`), so the sum over d levels is (1 - a^(d+1)) / (1 - a) (Leviathan et al. 2023, equation
    1)."""
    return depth + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


def expected_by_level(level_acceptance: Sequence[float], depth: int) -> float:
    """Return the expected tokens of a step as `expected_tokens` does, where acceptance depends on the level:
    `level_acceptance[l]` is the probability at level l, given that all levels above were accepted. The last
    entry holds for all deeper levels."""
    expected = reached = 1.0
    for level in range(depth):
        reached *= level_acceptance[min(level, len(level_acceptance) - 1)]
        expected += reached
    return expected
