"""Pack draws for the device: everything except the logits that the choice of a token depends on."""

import math
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.compute.sampling import seed_of
from streamserve.protocol.sampling import SamplingParams

_PACKED = Struct("<dddQIIii")
DRAW_WORDS = _PACKED.size // 4
"""Number of 32-bit words of a draw: temperature, top_p, log(min_p) (float64 each), seed (64 bits), choice,
output, top_k, filters. `filters` is 1 if top_k, top_p or min_p may exclude tokens. Temperature 0 is
greedy."""


class Draw(NamedTuple):
    """One token to choose: output number `output` of `choice` of a request with `params`."""

    params: SamplingParams
    choice: int
    output: int


CHOICE, OUTPUT = 8, 9
"""Positions of choice and output in a draw, in words."""


def pack_params(params: SamplingParams) -> bytes:
    """Return a draw without choice and output, for `pack_outputs`."""
    return _PACKED.pack(*_of(params), 0, 0, *_filters(params))


def pack_outputs(
    packed: Iterable[bytes], choices: Sequence[int], outputs: Sequence[int]
) -> NDArray[np.int32]:
    """Return the draws of one token for each of several requests, [draws, DRAW_WORDS], from their parameters
    as `packed` by `pack_params`. Faster than `pack_draws`."""
    draws = np.frombuffer(bytearray().join(packed), np.int32).reshape(-1, DRAW_WORDS)
    draws[:, CHOICE] = np.array(choices, np.int64)
    draws[:, OUTPUT] = np.array(outputs, np.int64)
    return draws


def pack_draws(draws: Iterable[Draw]) -> NDArray[np.int32]:
    """Return the draws in the form that the device's kernels read: [draws, DRAW_WORDS]."""
    packed = b"".join(
        _PACKED.pack(*_of(params), choice & 0xFFFFFFFF, output & 0xFFFFFFFF, *_filters(params))
        for params, choice, output in draws
    )
    return np.frombuffer(packed, np.int32).reshape(-1, DRAW_WORDS)


def _of(params: SamplingParams) -> tuple[float, float, float, int]:
    min_score = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return params.temperature, params.top_p, min_score, 0 if params.greedy else seed_of(params)


def _filters(params: SamplingParams) -> tuple[int, int]:
    top_k = min(max(params.top_k, 0), 2**31 - 1)
    return top_k, int(not params.greedy and (top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0))
