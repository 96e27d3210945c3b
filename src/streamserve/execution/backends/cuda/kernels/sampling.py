"""The choice of tokens (compute/sampling.py) as Triton kernels. Decisions are in float64, as on the host.

filters.py                 each chunk's largest logit, and the last token of each row that passes its filters
_estimate   (row, chunk)   the best score of each chunk with noise, in float32
_choose     (row)          the best token, in float64, of the chunks whose estimates are near the best one

Chunks are skipped if their best token cannot win with any noise.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.backends.cuda.kernels import filters
from streamserve.execution.backends.cuda.kernels.search import float64, rank

ERROR = tl.constexpr(1e-3)
"""Bound of an estimate's error: about 50 times the error of float32 and the device's logarithm."""

NONE = tl.constexpr(2147483647)

filters.WARPS.update(estimate=4, choose=8)


@triton.jit
def _philox(draw, token):
    """Return the first two words of Philox4x32-10 of (choice, output, token, 0), as in compute/noise.py."""
    k0 = tl.load(draw + 6).to(tl.uint32, bitcast=True)
    k1 = tl.load(draw + 7).to(tl.uint32, bitcast=True)
    c0 = tl.load(draw + 8).to(tl.uint32, bitcast=True) + tl.zeros_like(token)
    c1 = tl.load(draw + 9).to(tl.uint32, bitcast=True) + tl.zeros_like(token)
    c2 = token
    c3 = tl.zeros_like(token)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53  # 64 bits: one instruction gives both halves
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1


@triton.jit
def _gumbel(draw, token):
    """Return the noise of execution/compute/noise.py in float64."""
    w0, w1 = _philox(draw, token.to(tl.uint32))
    bits = ((w1.to(tl.uint64) << 32) | w0.to(tl.uint64)) >> 11
    u = tl.minimum((bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)
    return -tl.log(-tl.log(u))


@triton.jit
def _estimated_gumbel(draw, token):
    """Return the noise in float32. For u above 1/2 the distance from 1 is computed instead, because float32
    would lose most of its digits."""
    w0, w1 = _philox(draw, token.to(tl.uint32))
    upper = (w1 >> 31) != 0
    w0 = tl.where(upper, ~w0, w0)
    w1 = tl.where(upper, ~w1, w1)
    distance = w1.to(tl.float32) * 2.3283064e-10 + (w0.to(tl.float32) * 5.421011e-20 + 5.551115e-17)
    series = distance + distance * distance * (0.5 + distance * 0.33333334)
    logarithm = -0.6931472 * tl.log2(tl.where(upper, 1.0 - distance, distance))
    return -0.6931472 * tl.log2(tl.where(upper & (distance < 0.015625), series, logarithm))


@triton.jit
def _estimate(
    logits, draws, peaks, thresholds, estimates, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """Store the difference of a chunk's best score with noise and the row's best score without noise, within
    ERROR. Greedy rows are left out."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + row * DRAW_WORDS
    temperature = float64(draw).to(tl.float32)
    if temperature > 0.0:
        chunk = tl.arange(0, CHUNKS)
        peak = tl.max(tl.load(peaks + row * chunks + chunk, chunk < chunks, float("-inf")))
        own = tl.load(peaks + row * chunks + number)
        threshold = tl.load(thresholds + row)
        estimate = tl.full([], float("-inf"), tl.float32)
        # Noise lies between -3.63 and 36.74.
        if (own - peak >= -40.4 * temperature) & (rank(own, number * CHUNK, TOKEN_BITS) >= threshold):
            token = number * CHUNK + tl.arange(0, CHUNK)
            inside = token < vocabulary
            x = tl.load(logits + row * vocabulary + token, inside, 0.0)
            inside = inside & (rank(x, token, TOKEN_BITS) >= threshold)
            score = (x - peak) * (1.0 / temperature) + _estimated_gumbel(draw, token)
            estimate = tl.max(tl.where(inside, score, float("-inf")))
        tl.store(estimates + row * chunks + number, estimate)


@triton.jit
def _best_of_chunk(
    logits, draw, threshold, temperature, number, vocabulary, CHUNK: tl.constexpr, TOKEN_BITS: tl.constexpr
):
    """Return the best score of a chunk, and its token. Without noise if the temperature is 0."""
    token = number * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    x = tl.load(logits + token, inside, 0.0)
    score = x.to(tl.float64)
    if temperature > 0.0:
        inside = inside & (rank(x, token, TOKEN_BITS) >= threshold)
        score = score / temperature + _gumbel(draw, token)
    score = tl.where(inside, score, float("-inf"))
    best = tl.max(score)
    return best, tl.min(tl.where(inside & (score == best), token, NONE))


@triton.jit
def _choose(
    logits, draws, peaks, finite, thresholds, estimates, out, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    temperature, threshold = float64(draw), tl.load(thresholds + row)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    places = row * chunks + chunk
    estimate = tl.load(peaks + places, inside, float("-inf"))
    # The larger a score, the more of the noise is lost in rounding: allow for it in the error.
    peak = tl.max(estimate).to(tl.float64)
    error = tl.full([], 0.0, tl.float64)
    if temperature > 0.0:
        estimate = tl.load(estimates + places, inside, float("-inf"))
        error += ERROR + tl.abs(peak) / tl.maximum(temperature, 1e-3) * 1e-15
    near = inside & (estimate >= tl.max(estimate) - 2.0 * error)
    number = tl.min(tl.where(near, chunk, NONE))
    score = tl.full([], float("-inf"), tl.float64)
    winner = -1
    while number < chunks:
        best, token = _best_of_chunk(
            logits + row * vocabulary, draw, threshold, temperature, number, vocabulary, CHUNK, TOKEN_BITS
        )
        winner = tl.where(best > score, token, winner)
        score = tl.maximum(score, best)
        following = tl.min(tl.where(near & (chunk > number), chunk, NONE))
        number = tl.where(temperature > 0.0, following, NONE)  # greedy: the first of the best chunks suffices
    is_finite = tl.min(tl.load(finite + places, inside, 1)) == 1
    tl.store(out + row, tl.where(is_finite, winner, -1))


def choose_tokens(logits: Tensor, draws: Tensor, out: Tensor) -> None:
    """See `plain.sampling.choose_tokens`."""
    rows, vocabulary = logits.shape
    surveyed = filters.survey(logits)
    thresholds = filters.find_thresholds(logits, draws, surveyed)
    chunks = surveyed.peaks.shape[1]
    arguments = surveyed._asdict() | {
        "logits": logits, "draws": draws, "thresholds": thresholds, "out": out,
        "estimates": torch.empty_like(surveyed.peaks), "vocabulary": vocabulary, "chunks": chunks,
    }  # fmt: skip
    filters.launch(_estimate, (rows, chunks), arguments, "estimate")
    filters.launch(_choose, (rows,), arguments, "choose")
