"""Cost of a step: a curve over its query tokens and the KV it starts from, as measured by a profile.

seconds  │            ╱      tokens      query tokens of the step, over all its sequences
         │        ___╱       kv_bytes    KV that these sequences hold before the step
         │ ______╱           pairs       extra cost of long spans, see `further_pairs`
         └──────────── tokens
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from streamserve.protocol.cost_curve import CostCurve

MAX_CACHED_COSTS = 4096
"""Number of cached step costs per cost curve."""


class StepCost(CostCurve, frozen=True, dict=True):
    """Seconds of a step: `seconds[i][j]` for `tokens[i]` query tokens and `kv_bytes[j]`, linear between the
    points.

    The grid was measured with sequences of one or a few query tokens each. A sequence with many query tokens
    costs `pair_seconds` more for each of its `further_pairs`. Beyond the grid the curve continues with its
    last slope, but with at least `token_seconds` a token and `byte_seconds` a byte: measured curves are
    staircases, and the last slope may be a flat step. The curve never falls.

    Raises ValueError unless both axes ascend, costs are positive and never fall along either axis, and the
    slopes are not negative.
    """

    def __post_init__(self) -> None:
        for name, axis, minimum in (("tokens", self.tokens, 1), ("kv_bytes", self.kv_bytes, 0)):
            if not axis or axis[0] < minimum or (np.diff(axis) <= 0).any():
                raise ValueError(f"{name} must ascend from {minimum} or more, not {axis}")
        if [len(row) for row in self.seconds] != [len(self.kv_bytes)] * len(self.tokens):
            raise ValueError("seconds must have a row for each of tokens and an entry for each of kv_bytes")
        grid = np.array(self.seconds)
        if not (np.isfinite(grid).all() and (grid > 0).all()):
            raise ValueError("seconds must be positive and finite")
        for name in ("pair_seconds", "token_seconds", "byte_seconds"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be finite and not negative")
        if (np.diff(grid, axis=0) < 0).any() or (np.diff(grid, axis=1) < 0).any():
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
        grid, x, y = np.array(self.seconds), np.array(self.tokens), np.array(self.kv_bytes)
        beyond_x = _last_slopes(self.tokens, grid.T, self.token_seconds)
        beyond_y = _last_slopes(self.kv_bytes, grid, self.byte_seconds)
        by_token = np.vstack([np.zeros(len(y)), np.diff(grid, axis=0) / np.diff(x)[:, None], beyond_x])
        by_byte = np.column_stack([np.zeros(len(x)), np.diff(grid, axis=1) / np.diff(y), beyond_y])
        twist = np.zeros((len(x) + 1, len(y) + 1))
        twist[:, 1:-1] = np.diff(by_token, axis=1) / np.diff(y)
        twist[1:-1, -1] = np.diff(beyond_y) / np.diff(x)
        i, j = np.maximum(np.arange(len(x) + 1) - 1, 0), np.maximum(np.arange(len(y) + 1) - 1, 0)
        parts = np.broadcast_arrays(
            x[i][:, None], y[j], grid[np.ix_(i, j)], by_token[:, j], by_byte[i], twist
        )
        return [list(zip(*(part.tolist() for part in row), strict=True)) for row in zip(*parts, strict=True)]


_Cell = tuple[float, float, float, float, float, float]
"""A piece of the surface: its lower ends in tokens and bytes, the seconds there, and the slopes by token, by
byte, and by token times byte."""


@dataclass(frozen=True)
class WorkerCosts:
    """Costs of a worker's steps in seconds, for a router.

    * `prefill(tokens)`: the prefill of a prompt.
    * `decode(sequences, kv_tokens)`: a decode step; `kv_tokens` is the KV of all its sequences together.
    * `token`: additional seconds of a decode step for each additional KV token.
    * `block_size`: tokens of a KV block.
    """

    prefill: Callable[[int], float]
    decode: Callable[[int, int], float]
    token: float = 0.0
    block_size: int = 16


@lru_cache(maxsize=256)
def worker_costs(curve: CostCurve, kv_token_bytes: int, block_size: int) -> WorkerCosts:
    """Return the step costs of a worker from its cost curve, shared by all workers with this curve. Costs are
    cached, because routers query the same few steps repeatedly."""
    step = StepCost(*msgspec.structs.astuple(curve))
    cached = lru_cache(maxsize=MAX_CACHED_COSTS)
    return WorkerCosts(
        prefill=cached(lambda tokens: step(tokens, 0, further_pairs(tokens, 0))),
        decode=cached(step.in_tokens(kv_token_bytes)),
        token=curve.byte_seconds * kv_token_bytes,
        block_size=block_size,
    )


@dataclass(frozen=True)
class Line:
    """A linear cost in seconds: `start + each * count`, and 0 for a count of 0."""

    start: float
    each: float

    def __call__(self, count: float) -> float:
        return self.start + self.each * count if count else 0.0


@dataclass(frozen=True)
class SwapCost:
    """Seconds of copying KV `out` to the host pool and `back`, by bytes or by blocks."""

    out: Line
    back: Line

    def in_blocks(self, block_bytes: int) -> "SwapCost":
        """Return this cost by bytes as a cost by blocks of `block_bytes` bytes."""
        lines = (Line(line.start, line.each * block_bytes) for line in (self.out, self.back))
        return SwapCost(*lines)


DEFAULT_SWAP_COST = SwapCost(Line(1e-4, 2e-4), Line(1e-4, 2e-4))
"""The cost assumed where copies were not measured: blocks of one megabyte at about 5 GB/s."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of an engine's work: `step(query_tokens, kv_tokens)`, and the `swap` of blocks.

    `step` may be a measured curve (`StepCost.in_tokens`), a curve that learns from executed steps
    (`RefinedCost`), or a default.
    """

    step: Callable[[int, int], float]
    swap: SwapCost = DEFAULT_SWAP_COST

    def prefill(self, tokens: int, chunk: int) -> float:
        """Return the seconds to compute the KV of a prompt's first `tokens` tokens, alone in the batch, in
        steps of `chunk` query tokens."""
        starts = range(0, tokens, chunk)
        return sum(self.step(min(chunk, tokens - start), start) for start in starts)


def fit_line(counts: Sequence[int], seconds: Sequence[float]) -> Line:
    """Return the line through measured `seconds`, by least squares of relative errors. Neither coefficient is
    negative: where the least squares would have a negative one, the line goes through 0 with the median
    slope."""
    x, y = np.asarray(counts, np.float64), np.asarray(seconds, np.float64)
    basis = np.stack((1 / y, x / y), axis=1)
    (start, each), *_ = np.linalg.lstsq(basis, np.ones(len(y)))
    if start < 0 or each < 0:
        start, each = 0.0, float(np.median(y / x))
    return Line(float(start), float(each))


def fit(
    tokens: Sequence[int],
    kv_bytes: Sequence[int],
    seconds: npt.ArrayLike,
    token_seconds: float = 0.0,
    byte_seconds: float = 0.0,
) -> StepCost:
    """Return the curve through measured `seconds` [tokens, kv_bytes], with `pair_seconds` 0. A step that was
    measured slower than a larger one gets the larger one's seconds: disturbances of a measurement only add
    time."""
    grid = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1, ::-1], axis=0)
    grid = np.minimum.accumulate(grid, axis=1)[::-1, ::-1]
    curve = tuple(tuple(row) for row in grid.tolist())
    return StepCost(
        tuple(tokens), tuple(kv_bytes), curve, token_seconds=token_seconds, byte_seconds=byte_seconds
    )


def further_pairs(query_tokens: int, start: int) -> int:
    """Return the number of attention pairs (query token, attended token) that the grid of `StepCost` does not
    include, for a sequence with `query_tokens` after `start` tokens. The grid includes the first query token
    with its `start` tokens, and each query token with itself."""
    return (query_tokens - 1) * start + query_tokens * (query_tokens - 1) // 2


def _last_slopes(
    axis: tuple[int, ...], lines: npt.NDArray[np.float64], minimum: float
) -> npt.NDArray[np.float64]:
    """Return, for each of `lines` over `axis`, the slope beyond its end: at least `minimum`, and never less
    than the previous line's slope."""
    last = (lines[:, -1] - lines[:, -2]) / (axis[-1] - axis[-2]) if len(axis) > 1 else np.zeros(len(lines))
    return np.maximum.accumulate(np.maximum(last, minimum))
