"""Cost of a step: a curve over its query tokens and the KV it starts from, as measured by a profile.

seconds  │            ╱      tokens      query tokens of the step, over all its sequences
         │        ___╱       kv_bytes    KV that these sequences hold before the step
         │ ______╱           pairs       extra cost of long spans, see contracts.cost.further_pairs
         └──────────── tokens
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import pairwise
from math import inf

import msgspec


class CostCurve(msgspec.Struct, frozen=True, dict=True):
    """The predicted seconds of a step, from a measured grid: a step with `tokens[i]` query tokens and
    `kv_bytes[j]` bytes of KV takes `seconds[i][j]`. Between grid points the curve is linear. A worker
    measures its curve, predicts its own steps with it, and sends it to the fleet.

    The grid was measured with sequences of one or a few query tokens each. A sequence with many query tokens
    has more pairs of a query token and an attended token than the grid includes; each such pair costs
    `pair_seconds` (contracts.cost.further_pairs counts them). Beyond the grid the curve continues with its
    last slope, but with at least `token_seconds` a token and `byte_seconds` a byte: measured curves are
    staircases, and the last slope may be a flat step. The curve never falls.

    Raises ValueError unless both axes ascend, costs are positive and never fall along either axis, and the
    slopes are not negative.
    """

    tokens: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    pair_seconds: float = 0.0
    token_seconds: float = 0.0
    byte_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, axis, minimum in (("tokens", self.tokens, 1), ("kv_bytes", self.kv_bytes, 0)):
            if not axis or axis[0] < minimum or any(left >= right for left, right in pairwise(axis)):
                raise ValueError(f"{name} must ascend from {minimum} or more, not {axis}")
        if [len(row) for row in self.seconds] != [len(self.kv_bytes)] * len(self.tokens):
            raise ValueError("seconds must have a row for each of tokens and an entry for each of kv_bytes")
        if not all(0 < cost < inf for row in self.seconds for cost in row):
            raise ValueError("seconds must be positive and finite")
        for name in ("pair_seconds", "token_seconds", "byte_seconds"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be finite and not negative")
        lines = (*self.seconds, *zip(*self.seconds, strict=True))
        if any(less > more for line in lines for less, more in pairwise(line)):
            raise ValueError("seconds must not fall with tokens or with kv_bytes")

    def __call__(self, tokens: float, kv_bytes: float = 0, pairs: float = 0) -> float:
        """Return the seconds of a step; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        i, j = bisect_right(self.tokens, tokens), bisect_right(self.kv_bytes, kv_bytes)
        left, lower, minimum, by_token, by_byte, twist = self._cells[i][j]
        right, above = tokens - left, kv_bytes - lower
        return minimum + by_token * right + (by_byte + twist * right) * above + self.pair_seconds * pairs

    def in_tokens(self, kv_token_bytes: int) -> Callable[[int, int], float]:
        """Return the curve as a function of query tokens and KV tokens, of `kv_token_bytes` bytes each."""
        return lambda query_tokens, kv_tokens: self(query_tokens, kv_tokens * kv_token_bytes)

    @cached_property
    def _cells(self) -> list[list["_Cell"]]:
        """The pieces of the surface, by [points of `tokens`, points of `kv_bytes`] that are not above the
        arguments. Before the grid the surface is flat, after it it has the last slope."""
        x, y, grid = self.tokens, self.kv_bytes, self.seconds
        by_token = _slopes(x, zip(*grid, strict=True), self.token_seconds)
        by_byte = _slopes(y, grid, self.byte_seconds)

        def cell(i: int, j: int) -> _Cell:
            a, b = max(i - 1, 0), max(j - 1, 0)
            twist = 0.0
            if 0 < j < len(y):
                twist = (by_token[j][i] - by_token[b][i]) / (y[j] - y[b])
            elif j and 0 < i < len(x):
                twist = (by_byte[i][j] - by_byte[a][j]) / (x[i] - x[a])
            return x[a], y[b], grid[a][b], by_token[b][i], by_byte[a][j], twist

        return [[cell(i, j) for j in range(len(y) + 1)] for i in range(len(x) + 1)]


_Cell = tuple[float, float, float, float, float, float]
"""A piece of the surface: its lower ends in tokens and bytes, the seconds there, and the slopes by token, by
byte, and by token times byte."""


def _slopes(axis: tuple[int, ...], lines: Iterable[tuple[float, ...]], minimum: float) -> list[list[float]]:
    """Return the slopes of each of `lines` over `axis`: 0 before its first point, one between each two
    points, and one beyond its end: at least `minimum`, and never less than the previous line's."""
    slopes, beyond = [], minimum
    for line in lines:
        steps = zip(pairwise(line), pairwise(axis), strict=True)
        inner = [(b - a) / (right - left) for (a, b), (left, right) in steps]
        beyond = max([beyond, *inner[-1:]])
        slopes.append([0.0, *inner, beyond])
    return slopes
