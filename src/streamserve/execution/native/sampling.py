"""Choosing tokens with the kernels: all rows of a step in one call."""

from collections.abc import Sequence
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from streamserve.execution.native.library import Team
from streamserve.execution.sampling import Row, Scores, seed_of

_DRAW = Struct("PQdddiiII")
"""cpp/sampling.h: Draw."""


class NativeChooser:
    """execution.sampling.Chooser on the kernels, for float32 logits.

    It does what numpy does in the same float64, but for the last bit of a logarithm or an exponential.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def __call__(self, logits: Tensor, rows: Sequence[Row], adjusted: Sequence[Scores | None]) -> list[int]:
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits must be contiguous float32, not {logits.dtype}")
        draws = b"".join(map(_draw, rows, adjusted))
        tokens = np.empty(len(rows), dtype=np.int32)
        self._team.library.ss_sample(
            self._team.pool, logits.data_ptr(), logits.shape[1], draws, len(rows), tokens.ctypes.data
        )
        chosen: list[int] = tokens.tolist()
        return chosen


def _draw(row: Row, scores: Scores | None) -> bytes:
    params = row.params
    return _DRAW.pack(
        0 if scores is None else scores.ctypes.data,
        0 if params.greedy else seed_of(params),
        params.temperature,
        params.top_p,
        np.log(params.min_p) if params.min_p > 0.0 else -np.inf,
        row.logits,
        min(max(params.top_k, 0), 2**31 - 1),
        row.choice & 0xFFFFFFFF,
        len(row.outputs) & 0xFFFFFFFF,
    )
