"""Costs in seconds of a worker's steps, of swapped KV and of an engine's work, and fits of measurements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from streamserve.protocol.cost_curve import CostCurve

MAX_CACHED_COSTS = 4096
"""Number of cached step costs per cost curve."""


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
    cached = lru_cache(maxsize=MAX_CACHED_COSTS)
    return WorkerCosts(
        prefill=cached(lambda tokens: curve(tokens, 0, further_pairs(tokens, 0))),
        decode=cached(curve.in_tokens(kv_token_bytes)),
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

    `step` may be a measured curve (`CostCurve.in_tokens`), a curve that learns from executed steps
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
) -> CostCurve:
    """Return the curve through measured `seconds` [tokens, kv_bytes], with `pair_seconds` 0. A step that was
    measured slower than a larger one gets the larger one's seconds: disturbances of a measurement only add
    time."""
    grid = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1, ::-1], axis=0)
    grid = np.minimum.accumulate(grid, axis=1)[::-1, ::-1]
    curve = tuple(tuple(row) for row in grid.tolist())
    return CostCurve(
        tuple(tokens), tuple(kv_bytes), curve, token_seconds=token_seconds, byte_seconds=byte_seconds
    )


def further_pairs(query_tokens: int, start: int) -> int:
    """Return the number of attention pairs (query token, attended token) that the grid of a cost curve does
    not include, for a sequence with `query_tokens` after `start` tokens. The grid includes the first query
    token with its `start` tokens, and each query token with itself."""
    return (query_tokens - 1) * start + query_tokens * (query_tokens - 1) // 2
