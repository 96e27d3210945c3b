"""The choice of tokens (execution/sampling.py) as Triton kernels; the numbers are float64, as on the host.

_peaks     (row, chunk)   each chunk's best logit, and whether all are finite
_filter    (row)          top_k and top_p as a threshold: key and, among equal ones, token id
_best      (row, chunk)   the chunk's best token, with noise
_choose    (row)          the best of all chunks

A row without filters passes _filter at once; a chunk whose best token no noise can make win is skipped.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.cuda.draws import DRAW_WORDS
from streamserve.execution.cuda.kernels.example import KernelExample

CHUNK = 2048
"""Tokens of a program."""

SLICE = 2 * CHUNK
"""Tokens of a step of the threshold search, which passes those by whose best logit is too low."""


@triton.jit
def _float64(words):
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (low | (high << 32)).to(tl.float64, bitcast=True)


@triton.jit
def _key(logits):
    """Return integers in the order of float32 numbers; 0 and -0 are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(logits == 0.0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _gumbel(seed_low, seed_high, choice, output, token):
    """Return the noise of execution/noise.py: Philox4x32-10 of (choice, output, token, 0)."""
    c0 = choice + tl.zeros_like(token)
    c1 = output + tl.zeros_like(token)
    c2 = token
    c3 = tl.zeros_like(token)
    k0, k1 = seed_low, seed_high
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    bits = ((c1.to(tl.uint64) << 32) | c0.to(tl.uint64)) >> 11
    u = tl.minimum((bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)
    return -tl.log(-tl.log(u))


@triton.jit
def _peaks(logits, peaks, finite, vocabulary, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocabulary + token, token < vocabulary, float("-inf")).to(tl.float32)
    is_finite = (x - x == 0.0) | (token >= vocabulary)
    chunk_index = row * tl.num_programs(1) + chunk
    tl.store(peaks + chunk_index, tl.max(x))
    tl.store(finite + chunk_index, tl.min(is_finite.to(tl.int32)))


@triton.jit
def _reaches(peaks, start, chunks, key, CHUNK: tl.constexpr, SLICE: tl.constexpr):
    """Return whether any token of the slice from `start` on has at least `key`."""
    chunk = start // CHUNK + tl.arange(0, SLICE // CHUNK)
    return tl.max(_key(tl.load(peaks + chunk, chunk < chunks, float("-inf")))) >= key


@triton.jit
def _count(
    logits, peaks, vocabulary, chunks, key, token_limit,
    CHUNK: tl.constexpr, SLICE: tl.constexpr, EQUAL: tl.constexpr,
):  # fmt: skip
    """Return how many tokens have at least `key`; with EQUAL, exactly `key` and an id up to the limit."""
    count = 0
    for start in range(0, vocabulary, SLICE):
        if _reaches(peaks, start, chunks, key, CHUNK, SLICE):
            token = start + tl.arange(0, SLICE)
            inside = token < vocabulary
            keys = _key(tl.load(logits + token, inside, float("-inf")).to(tl.float32))
            fits = (keys == key) & (token <= token_limit) if EQUAL else keys >= key
            count += tl.sum((inside & fits).to(tl.int32))
    return count


@triton.jit
def _mass(
    logits, peaks, vocabulary, chunks, key, k_key, k_token, least, best, temperature,
    CHUNK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Return the weight of the tokens with at least `key` that top_k and min_p leave."""
    mass = tl.zeros([SLICE], tl.float64)
    for start in range(0, vocabulary, SLICE):
        if _reaches(peaks, start, chunks, tl.maximum(key, k_key), CHUNK, SLICE):
            token = start + tl.arange(0, SLICE)
            inside = token < vocabulary
            x = tl.load(logits + token, inside, float("-inf")).to(tl.float32)
            keys = _key(x)
            scaled = x.to(tl.float64) / temperature
            fits = inside & (keys >= key) & ((keys > k_key) | ((keys == k_key) & (token <= k_token)))
            fits = fits & (scaled >= least)
            mass += tl.where(fits, tl.exp(scaled - best), 0.0)
    return tl.sum(mass)


@triton.jit
def _last_tie(
    logits, peaks, vocabulary, chunks, key, above, each, goal, CHUNK: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """Return the id up to which tokens with exactly `key` are taken: the first ones, of the weight `each`,
    with which the weight `above` of larger keys reaches the goal. The vocabulary's size if all are."""
    ties = _count(logits, peaks, vocabulary, chunks, key, vocabulary, CHUNK, SLICE, True)
    below, up_to = tl.where(above + each * (ties - 1) < goal, vocabulary - 1, -1), vocabulary
    while up_to - below > 1:
        middle = (below + up_to) >> 1
        taken = _count(logits, peaks, vocabulary, chunks, key, middle, CHUNK, SLICE, True)
        enough = above + each * taken >= goal
        up_to = tl.where(enough, middle, up_to)
        below = tl.where(enough, below, middle)
    return up_to


@triton.jit
def _filter(
    logits, draws, peaks, thresholds, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, SLICE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    lowest = -2147483648
    k_key, k_token, p_key, p_token = lowest, vocabulary, lowest, vocabulary
    if tl.load(draw + 11) != 0:
        logits += row * vocabulary
        peaks += row * chunks
        temperature, top_p, least = _float64(draw), _float64(draw + 2), _float64(draw + 4)
        chunk = tl.arange(0, CHUNKS)
        peak = tl.max(tl.load(peaks + chunk, chunk < chunks, float("-inf")))
        best = peak.to(tl.float64) / temperature
        bound = best + least
        top_k = tl.load(draw + 10)
        if (top_k > 0) & (top_k < vocabulary):
            low, high = lowest.to(tl.int64), _key(peak).to(tl.int64) + 1
            while high - low > 1:  # at least top_k tokens have `low`, fewer have `high`
                middle = (low + high) >> 1
                key = middle.to(tl.int32)
                enough = _count(logits, peaks, vocabulary, chunks, key, 0, CHUNK, SLICE, False) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            k_key = low.to(tl.int32)
            above = _count(logits, peaks, vocabulary, chunks, k_key + 1, 0, CHUNK, SLICE, False)
            k_token = _last_tie(logits, peaks, vocabulary, chunks, k_key, above, 1, top_k, CHUNK, SLICE)
        if top_p < 1.0:
            goal = top_p * _mass(
                logits, peaks, vocabulary, chunks, lowest, k_key, k_token, bound, best, temperature,
                CHUNK, SLICE,
            )  # fmt: skip
            low, high = lowest.to(tl.int64), _key(peak).to(tl.int64) + 1
            while high - low > 1:  # the tokens from `low` on reach the goal, those from `high` on do not
                middle = (low + high) >> 1
                mass = _mass(
                    logits, peaks, vocabulary, chunks, middle.to(tl.int32), k_key, k_token, bound, best,
                    temperature, CHUNK, SLICE,
                )  # fmt: skip
                low = tl.where(mass >= goal, middle, low)
                high = tl.where(mass >= goal, high, middle)
            p_key = low.to(tl.int32)
            mass = _mass(
                logits, peaks, vocabulary, chunks, p_key + 1, k_key, k_token, bound, best, temperature,
                CHUNK, SLICE,
            )  # fmt: skip
            bits = p_key ^ ((p_key >> 31) & 0x7FFFFFFF)
            each = tl.exp(bits.to(tl.float32, bitcast=True).to(tl.float64) / temperature - best)
            p_token = _last_tie(logits, peaks, vocabulary, chunks, p_key, mass, each, goal, CHUNK, SLICE)
    tl.store(thresholds + row * 4, k_key)
    tl.store(thresholds + row * 4 + 1, k_token)
    tl.store(thresholds + row * 4 + 2, p_key)
    tl.store(thresholds + row * 4 + 3, p_token)


@triton.jit
def _best(
    logits, draws, peaks, thresholds, scores, tokens, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + row * DRAW_WORDS
    chunk_index = row * chunks + number
    temperature = _float64(draw)
    chunk = tl.arange(0, CHUNKS)
    peak = tl.max(tl.load(peaks + row * chunks + chunk, chunk < chunks, float("-inf")))
    own = tl.load(peaks + chunk_index)
    sampled = temperature > 0.0
    divisor = tl.where(sampled, temperature, 1.0)
    best = peak.to(tl.float64) / divisor
    # Noise lies between -3.63 and 36.74.
    reach = tl.where(sampled, 40.37, 0.0)
    score = tl.full([], float("-inf"), tl.float64)
    winner = 0
    if own.to(tl.float64) / divisor >= best - reach:
        token = number * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocabulary
        x = tl.load(logits + row * vocabulary + token, inside, float("-inf")).to(tl.float32)
        values = x.to(tl.float64) / divisor
        if sampled:
            keys = _key(x)
            k_key, k_token = tl.load(thresholds + row * 4), tl.load(thresholds + row * 4 + 1)
            p_key, p_token = tl.load(thresholds + row * 4 + 2), tl.load(thresholds + row * 4 + 3)
            inside = inside & ((keys > k_key) | ((keys == k_key) & (token <= k_token)))
            inside = inside & ((keys > p_key) | ((keys == p_key) & (token <= p_token)))
            inside = inside & (values >= best + _float64(draw + 4))
            values += _gumbel(
                tl.load(draw + 6).to(tl.uint32, bitcast=True),
                tl.load(draw + 7).to(tl.uint32, bitcast=True),
                tl.load(draw + 8).to(tl.uint32, bitcast=True),
                tl.load(draw + 9).to(tl.uint32, bitcast=True),
                token.to(tl.uint32),
            )
        values = tl.where(inside, values, float("-inf"))
        score = tl.max(values)
        winner = tl.min(tl.where(inside & (values == score), token, 2147483647))
    tl.store(scores + chunk_index, score)
    tl.store(tokens + chunk_index, winner)


@triton.jit
def _choose(scores, tokens, finite, out, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    values = tl.load(scores + row * chunks + chunk, inside, float("-inf"))
    token = tl.load(tokens + row * chunks + chunk, inside, 2147483647)
    is_finite = tl.min(tl.load(finite + row * chunks + chunk, inside, 1))
    winner = tl.min(tl.where(inside & (values == tl.max(values)), token, 2147483647))
    tl.store(out + row, tl.where(is_finite == 1, winner, -1))


def choose_tokens(logits: Tensor, draws: Tensor, out: Tensor) -> None:
    """As plain.sampling.choose_tokens."""
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    padded = triton.next_power_of_2(chunks)

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    peaks, finite = scratch(torch.float32, rows, chunks), scratch(torch.int32, rows, chunks)
    thresholds = scratch(torch.int32, rows, 4)
    scores, tokens = scratch(torch.float64, rows, chunks), scratch(torch.int32, rows, chunks)
    _peaks[(rows, chunks)](logits, peaks, finite, vocabulary, CHUNK=CHUNK)
    _filter[(rows,)](
        logits, draws, peaks, thresholds, vocabulary, chunks,
        DRAW_WORDS=DRAW_WORDS, CHUNK=CHUNK, SLICE=SLICE, CHUNKS=padded, num_warps=16,
    )  # fmt: skip
    _best[(rows, chunks)](
        logits, draws, peaks, thresholds, scores, tokens, vocabulary, chunks,
        DRAW_WORDS=DRAW_WORDS, CHUNK=CHUNK, CHUNKS=padded, num_warps=8,
    )  # fmt: skip
    _choose[(rows,)](scores, tokens, finite, out, chunks, CHUNKS=padded, num_warps=1)


def examples(capability: int) -> list[KernelExample]:
    """Return the launches for a vocabulary of 128 Ki tokens, the same on any device."""
    sizes = {"vocabulary": "i32", "chunks": "i32"}
    logits = {"logits": "*fp32", "draws": "*i32", "peaks": "*fp32", "thresholds": "*i32"}
    outputs = {"scores": "*fp64", "tokens": "*i32"}
    return [
        KernelExample(
            "choose: peaks", _peaks,
            {"logits": "*fp32", "peaks": "*fp32", "finite": "*i32", "vocabulary": "i32"}, {"CHUNK": CHUNK},
        ),
        KernelExample(
            "choose: filter", _filter, logits | sizes,
            {"DRAW_WORDS": DRAW_WORDS, "CHUNK": CHUNK, "SLICE": SLICE, "CHUNKS": 64}, 16,
        ),
        KernelExample(
            "choose: best", _best, logits | outputs | sizes,
            {"DRAW_WORDS": DRAW_WORDS, "CHUNK": CHUNK, "CHUNKS": 64}, 8,
        ),
        KernelExample(
            "choose", _choose, outputs | {"finite": "*i32", "out": "*i32", "chunks": "i32"}, {"CHUNKS": 64}, 1
        ),
    ]  # fmt: skip
