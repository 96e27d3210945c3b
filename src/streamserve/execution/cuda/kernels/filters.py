"""top_k, top_p and min_p (execution/sampling.py) as Triton kernels: the last token that they leave of a row.

_range        (row)          the logits among which the last token is searched
first for top_k and min_p, then for top_p, in rows that have them:
  _histogram  (row, chunk)   the number of tokens in each of BINS intervals of logits
  _bound      (row)          the bins in which the last token can be
  _collect    (row, chunk)   the tokens in these bins, and the weight of the tokens above them
  _search     (row)          the last token, by bisection of the collected ones

A token weighs 1 for top_k; for top_p, its probability in proportion to the best token's. The histogram only
bounds the weights of top_p, to leave few tokens; the choice depends on float64 sums in a fixed order alone.
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

BINS = 256

CAPACITY = 8192
"""Tokens that are collected of a row; each chunk has an equal share. A row with more, most of whose logits
are equal, is read in each step of its search instead."""

SLICE = 4096
"""Tokens of a row that are read at a time in such a search."""

WARPS = {"histogram": 4, "collect": 4, "search": 16}

REACH = tl.constexpr(64.0)
"""top_k leaves out no tokens whose score is further from the best one: they weigh less than 2^-92."""

LOWEST = tl.constexpr(-(2**62))
"""A rank below those of all tokens."""


@triton.jit
def float64(words):
    """Return the number in two words of a draw."""
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
def rank(logits, token, TOKEN_BITS: tl.constexpr):
    """Return integers in the order of choice: larger for larger logits, and for lower ids of equal ones."""
    return (_key(logits).to(tl.int64) << TOKEN_BITS) - token


@triton.jit
def _weight(logits, peak, temperature, NUCLEUS: tl.constexpr):
    """Return the weights of tokens for top_p (NUCLEUS), or for top_k."""
    if NUCLEUS:
        return tl.exp((logits.to(tl.float64) - peak) * (1.0 / temperature))
    else:
        return tl.full(logits.shape, 1.0, tl.float64)


@triton.jit
def _range(
    draws, peaks, lows, finite, ranges, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """Store a row's largest and smallest logit, the start of its bins, and bins for a unit of logits; -1 of
    them if the row has no such filter.

    Tokens of a nucleus have more than (1 - top_p) / vocabulary of its weight: the others weigh less than
    1 - top_p together. (Half of that, so that rounding cannot matter.)
    """
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    chunk = tl.arange(0, CHUNKS)
    places, inside = row * chunks + chunk, chunk < chunks
    peak = tl.max(tl.load(peaks + places, inside, float("-inf")))
    low = tl.min(tl.load(lows + places, inside, float("inf")))
    temperature, top_p, top_k = float64(draw), float64(draw + 2), tl.load(draw + 10)
    if NUCLEUS:
        filtered = top_p < 1.0
        reach = tl.log(2.0 * vocabulary / tl.maximum(1.0 - top_p, 1e-16))
    else:
        filtered = (top_k > 0) & (top_k < vocabulary)
        reach = tl.full([], REACH, tl.float64)
    filtered = filtered & (tl.load(draw + 11) != 0) & (tl.min(tl.load(finite + places, inside, 1)) == 1)
    start = tl.maximum(peak - (reach * temperature).to(tl.float32), low)
    width = peak - start
    scale = tl.where(width > 1e-30, BINS / tl.maximum(width, 1e-30), 0.0)
    tl.store(ranges + row * 4, peak)
    tl.store(ranges + row * 4 + 1, low)
    tl.store(ranges + row * 4 + 2, start)
    tl.store(ranges + row * 4 + 3, tl.where(filtered, scale, -1.0))


@triton.jit
def _bin(logits, start, scale, BINS: tl.constexpr):
    """Return the bins of logits; those below the start are in bin 0."""
    return tl.minimum(tl.maximum(logits - start, 0.0) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _chunk(
    logits, thresholds, vocabulary, CHUNK: tl.constexpr, TOKEN_BITS: tl.constexpr, NUCLEUS: tl.constexpr
):
    """Return a chunk's tokens and logits, and which of them are searched: top_p, those that top_k left."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    searched = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, searched, 0.0)
    if NUCLEUS:
        searched = searched & (rank(x, token, TOKEN_BITS) >= tl.load(thresholds + row))
    return token, x, searched


@triton.jit
def _histogram(
    logits, ranges, thresholds, counts, vocabulary,
    CHUNK: tl.constexpr, BINS: tl.constexpr, TOKEN_BITS: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """Add a chunk's tokens to the counts [rows, BINS]."""
    row = tl.program_id(0).to(tl.int64)
    start, scale = tl.load(ranges + row * 4 + 2), tl.load(ranges + row * 4 + 3)
    if scale >= 0.0:
        _, x, searched = _chunk(logits, thresholds, vocabulary, CHUNK, TOKEN_BITS, NUCLEUS)
        count = tl.histogram(_bin(x, start, scale, BINS), BINS, searched)
        tl.atomic_add(counts + row * BINS + tl.arange(0, BINS), count, count > 0, sem="relaxed")


@triton.jit
def _bound(draws, ranges, counts, bins, DRAW_WORDS: tl.constexpr, BINS: tl.constexpr, NUCLEUS: tl.constexpr):
    """Store the first and the last bin in which a row's last token can be; first -1 where top_k reaches below
    the bins, to tokens that do not matter.

    The weight of a bin's tokens is known up to that of its edges. The tokens from some bin on reach top_p if
    (1 - top_p) · their weight >= top_p · the weight of the others.
    """
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    ranges += row * 4
    peak, low, start, scale = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    if scale >= 0.0:
        number = tl.arange(0, BINS)
        count = tl.load(counts + row * BINS + number)
        if NUCLEUS:
            temperature, top_p = float64(draw), float64(draw + 2)
            offset = (start - peak) / temperature
            step = tl.where(scale > 0.0, 1.0 / (tl.maximum(scale, 1e-30) * temperature), 0.0)
            least = tl.where(number > 0, count * tl.exp(offset + (number - 0.01) * step), 0.0)
            most = count * tl.exp(tl.minimum(offset + (number + 1.01) * step, 0.0))
            least_above, most_above = tl.cumsum(least, 0, reverse=True), tl.cumsum(most, 0, reverse=True)
            least_below, most_below = tl.sum(least) - least_above, tl.sum(most) - most_above
            reaches = (1.0 - top_p) * least_above >= top_p * most_below
            can_reach = (1.0 - top_p) * most_above >= top_p * least_below
            first = tl.max(tl.where(reaches, number, 0))
            last = tl.max(tl.where(can_reach, number, 0))
        else:
            reaches = tl.cumsum(count, 0, reverse=True) >= tl.load(draw + 10)
            last = tl.max(tl.where(reaches, number, 0))
            first = tl.where((start > low) & (last == 0), -1, last)
        tl.store(bins + row * 2, first)
        tl.store(bins + row * 2 + 1, last)


@triton.jit
def _collect(
    logits, draws, ranges, thresholds, bins, weights, members, sizes, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, SLOTS: tl.constexpr,
    TOKEN_BITS: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """Store a chunk's weight and its weight above the row's bins: `weights` [rows, chunks, 2]; its first
    tokens in the bins: `members` [rows, chunks, SLOTS]; and how many there are: `sizes` [rows, chunks]."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = row * chunks + number
    start, scale = tl.load(ranges + row * 4 + 2), tl.load(ranges + row * 4 + 3)
    first, last = tl.load(bins + row * 2), tl.load(bins + row * 2 + 1)
    if (scale >= 0.0) & (first >= 0):
        token, x, searched = _chunk(logits, thresholds, vocabulary, CHUNK, TOKEN_BITS, NUCLEUS)
        temperature = float64(draws + row * DRAW_WORDS)
        weight = tl.where(searched, _weight(x, tl.load(ranges + row * 4), temperature, NUCLEUS), 0.0)
        own_bin = _bin(x, start, scale, BINS)
        collected = searched & (own_bin >= first) & (own_bin <= last)
        size = tl.sum(collected.to(tl.int32))
        tl.store(weights + chunk * 2, tl.sum(weight))
        tl.store(weights + chunk * 2 + 1, tl.sum(tl.where(own_bin > last, weight, 0.0)))
        tl.store(sizes + chunk, size)
        if size > 0:
            slot = tl.cumsum(collected.to(tl.int32)) - 1
            tl.store(members + chunk * SLOTS + slot, token, collected & (slot < SLOTS))


@triton.jit
def _search_collected(ranks, weight, above, goal):
    """Return the largest rank from which on the tokens and the weight above them reach the goal."""
    lower, upper = tl.min(tl.where(weight > 0.0, ranks, -LOWEST)), tl.max(ranks) + 1
    while upper - lower > 1:  # the tokens from `lower` on reach the goal, those from `upper` on do not
        middle = lower + ((upper - lower) >> 1)
        enough = above + tl.sum(tl.where(ranks >= middle, weight, 0.0)) >= goal
        lower = tl.where(enough, middle, lower)
        upper = tl.where(enough, upper, middle)
    return lower


@triton.jit
def _search_row(
    logits, vocabulary, peak, temperature, goal, lower, upper,
    SLICE: tl.constexpr, TOKEN_BITS: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """Return the largest rank from `lower` up to `upper` from which on the row's tokens reach the goal."""
    while upper - lower > 1:
        middle = lower + ((upper - lower) >> 1)
        weight = tl.zeros([SLICE], tl.float64)
        for start in range(0, vocabulary, SLICE):
            token = start + tl.arange(0, SLICE)
            x = tl.load(logits + token, token < vocabulary, 0.0)
            fits = (token < vocabulary) & (rank(x, token, TOKEN_BITS) >= middle)
            weight += tl.where(fits, _weight(x, peak, temperature, NUCLEUS), 0.0)
        enough = tl.sum(weight) >= goal
        lower = tl.where(enough, middle, lower)
        upper = tl.where(enough, upper, middle)
    return lower


@triton.jit
def _lowest_rank(draw, peak, vocabulary, TOKEN_BITS: tl.constexpr):
    """Return the rank from which on tokens have min_p of the best token's probability."""
    temperature, least = float64(draw), float64(draw + 4)
    lowest = tl.full([], LOWEST, tl.int64)
    if (least > float("-inf")) & (temperature > 0.0):
        bound = peak.to(tl.float64) / temperature + least
        below, key = _key(tl.full([], float("-inf"), tl.float32)).to(tl.int64), _key(peak).to(tl.int64)
        while key - below > 1:
            middle = (below + key) >> 1
            bits = middle.to(tl.int32)
            bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            fits = bits.to(tl.float32, bitcast=True).to(tl.float64) / temperature >= bound
            key = tl.where(fits, middle, key)
            below = tl.where(fits, below, middle)
        lowest = (key << TOKEN_BITS) - vocabulary
    return lowest


@triton.jit
def _search(
    logits, draws, ranges, thresholds, bins, weights, members, sizes, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, SLICE: tl.constexpr,
    TOKEN_BITS: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """Store the rank from which on a row's tokens stay: by top_k and min_p, then by top_p too (NUCLEUS)."""
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    logits += row * vocabulary
    peak, low, scale = tl.load(ranges + row * 4), tl.load(ranges + row * 4 + 1), tl.load(ranges + row * 4 + 3)
    threshold = tl.full([], LOWEST, tl.int64)
    if NUCLEUS:
        threshold = tl.load(thresholds + row)
    if (scale >= 0.0) & (tl.load(bins + row * 2) >= 0):
        slot = tl.arange(0, CHUNKS * SLOTS)
        size = tl.load(sizes + row * chunks + slot // SLOTS, slot // SLOTS < chunks, 0)
        live = slot % SLOTS < size
        token = tl.load(members + row * chunks * SLOTS + slot, live, 0)
        x = tl.load(logits + token, live, 0.0)
        ranks = tl.where(live, rank(x, token, TOKEN_BITS), LOWEST)
        temperature = float64(draw)
        weight = tl.where(live, _weight(x, peak, temperature, NUCLEUS), 0.0)
        chunk = tl.arange(0, CHUNKS)
        parts = weights + (row * chunks + chunk) * 2
        above = tl.sum(tl.load(parts + 1, chunk < chunks, 0.0))
        goal = tl.load(draw + 10).to(tl.float64)
        if NUCLEUS:
            goal = float64(draw + 2) * tl.sum(tl.load(parts, chunk < chunks, 0.0))
        if (tl.max(size) <= SLOTS) & (above < goal) & (above + tl.sum(weight) >= goal):
            threshold = _search_collected(ranks, weight, above, goal)
        else:
            lower = tl.maximum(rank(low, vocabulary, TOKEN_BITS), threshold)
            upper = rank(peak, 0, TOKEN_BITS) + 1
            threshold = _search_row(
                logits, vocabulary, peak, temperature, goal, lower, upper, SLICE, TOKEN_BITS, NUCLEUS
            )
    if not NUCLEUS:
        threshold = tl.maximum(threshold, _lowest_rank(draw, peak, vocabulary, TOKEN_BITS))
    tl.store(thresholds + row, threshold)


def find_thresholds(logits: Tensor, draws: Tensor, peaks: Tensor, lows: Tensor, finite: Tensor) -> Tensor:
    """Return the ranks [rows] from which on tokens stay, by the largest and smallest logit of each chunk and
    whether all are finite, [rows, chunks] each."""
    rows, vocabulary = logits.shape
    chunks = peaks.shape[1]
    sizes = kernel_sizes(vocabulary)

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    ranges, bins = scratch(torch.float32, rows, 4), scratch(torch.int32, rows, 2)
    weights, thresholds = scratch(torch.float64, rows, chunks, 2), scratch(torch.int64, rows)
    members, filled = scratch(torch.int32, rows, chunks, sizes["SLOTS"]), scratch(torch.int32, rows, chunks)
    counts = torch.zeros(2, rows, BINS, dtype=torch.int32, device=logits.device)
    for nucleus in (False, True):
        options = {"NUCLEUS": nucleus}
        found = counts[int(nucleus)]
        launch(_range, (rows,), (draws, peaks, lows, finite, ranges, vocabulary, chunks), sizes | options, 1)
        launch(
            _histogram, (rows, chunks), (logits, ranges, thresholds, found, vocabulary), sizes | options,
            WARPS["histogram"],
        )  # fmt: skip
        launch(_bound, (rows,), (draws, ranges, found, bins), sizes | options, 1)
        collection = (logits, draws, ranges, thresholds, bins, weights, members, filled, vocabulary, chunks)
        launch(_collect, (rows, chunks), collection, sizes | options, WARPS["collect"])
        launch(_search, (rows,), collection, sizes | options, WARPS["search"])
    return thresholds


def launch(kernel, grid: tuple[int, ...], arguments: tuple, sizes: dict[str, int], warps: int) -> None:
    """Launch a kernel with the compile-time sizes that it has."""
    sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    kernel[grid](*arguments, **sizes, num_warps=warps)


def kernel_sizes(vocabulary: int) -> dict[str, int]:
    """Return the compile-time sizes of kernels for a vocabulary."""
    chunks = triton.next_power_of_2(triton.cdiv(vocabulary, CHUNK))
    return {
        "DRAW_WORDS": DRAW_WORDS, "CHUNK": CHUNK, "CHUNKS": chunks, "BINS": BINS,
        "SLOTS": max(1, CAPACITY // chunks), "SLICE": SLICE, "TOKEN_BITS": vocabulary.bit_length(),
    }  # fmt: skip


TYPES = {
    "logits": "*fp32", "draws": "*i32", "peaks": "*fp32", "lows": "*fp32", "finite": "*i32",
    "thresholds": "*i64", "ranges": "*fp32", "counts": "*i32", "bins": "*i32", "weights": "*fp64",
    "members": "*i32", "sizes": "*i32", "vocabulary": "i32", "chunks": "i32",
}  # fmt: skip


def example(name: str, kernel, warps: int, types: dict[str, str], **options: bool) -> KernelExample:
    """Return a launch for a vocabulary of 128 Ki tokens."""
    constants = kernel_sizes(128 << 10) | options
    names = kernel.arg_names
    return KernelExample(
        name, kernel, {name: types[name] for name in names if name in types},
        {name: constants[name] for name in names if name in constants}, warps,
        aligned=tuple(name for name in ("vocabulary",) if name in names),
    )  # fmt: skip


def examples(capability: int) -> list[KernelExample]:
    """Return the launches, the same on any device."""
    kernels = (_range, 1), (_histogram, WARPS["histogram"]), (_bound, 1), (_collect, WARPS["collect"])
    return [
        example(f"{name}:{kernel.__name__}", kernel, warps, TYPES, NUCLEUS=name == "top_p")
        for name in ("top_k", "top_p")
        for kernel, warps in (*kernels, (_search, WARPS["search"]))
    ]
