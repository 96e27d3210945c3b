"""Sampling of tokens and draft tokens with the kernels: all rows of a step in one call."""

import math
from collections.abc import Mapping, Sequence
from ctypes import c_int32

import numpy as np
import torch
from torch import Tensor

from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.backends.native.structures import DrawStruct, packer
from streamserve.execution.compute.draft_selection import NO_ADJUSTMENTS, ScoredToken
from streamserve.execution.compute.sampling import Row, Scores, seed_of
from streamserve.protocol.sampling import SamplingParams

_DRAW = packer(DrawStruct)


class NativeChooser:
    """A chooser of tokens (execution.compute.sampling.Chooser) by the kernels, for float32 logits.

    It computes in float64 like numpy in `Sampler`; only the last bit of a logarithm or an exponential may
    differ.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __call__(self, logits: Tensor, rows: Sequence[Row], adjusted: Sequence[Scores | None]) -> list[int]:
        _check(logits)
        draws = b"".join(
            _draw(row.logits, row.params, row.choice, len(row.outputs), scores)
            for row, scores in zip(rows, adjusted, strict=True)
        )
        tokens = (c_int32 * len(rows))()
        self._pool.library.ss_sample(
            self._pool.handle, logits.data_ptr(), logits.shape[1], draws, len(rows), tokens
        )
        return list(tokens)


class NativeDraftSelector:
    """Select draft tokens by the kernels, from float32 logits (compute.draft_selection.DraftSelector)."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        outputs: Sequence[int],
        count: int,
        adjusted: Mapping[int, Scores] = NO_ADJUSTMENTS,
    ) -> list[list[ScoredToken]]:
        _check(logits)
        rows, vocabulary = logits.shape
        considered = max(count, 2)  # features need the gap to the best other token
        draws = b"".join(
            _draw(row, params[row], choices[row], outputs[row], adjusted.get(row)) for row in range(rows)
        )
        tokens = np.empty((rows, considered), dtype=np.int32)
        scores = np.empty((rows, considered))
        self._pool.library.ss_select_draft_tokens(
            self._pool.handle, logits.data_ptr(), vocabulary, draws, rows, considered,
            tokens.ctypes.data, scores.ctypes.data,
        )  # fmt: skip
        greedy = np.fromiter((row_params.greedy for row_params in params), bool, rows)[:, None]
        others = scores[:, [1, *[0] * (considered - 1)]]
        with np.errstate(invalid="ignore"):  # a grammar may allow fewer tokens: others have the score -inf
            gaps = np.minimum(others - scores, 700.0)
        features = np.where(greedy, np.exp(scores), 1.0 / (1.0 + np.exp(gaps)))
        return [
            [token for token in zip(a, b, strict=True) if token[0] >= 0]
            for a, b in zip(tokens[:, :count].tolist(), features[:, :count].tolist(), strict=True)
        ]


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32, not {logits.dtype}")


def _draw(row: int, params: SamplingParams, choice: int, output: int, scores: Scores | None) -> bytes:
    return _DRAW.pack(
        0 if scores is None else scores.ctypes.data,
        0 if params.greedy else seed_of(params),
        params.temperature,
        params.top_p,
        np.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        row,
        min(max(params.top_k, 0), 2**31 - 1),
        choice & 0xFFFFFFFF,
        output & 0xFFFFFFFF,
    )
