"""Triton kernels that find each row's last token that top_k, top_p and min_p leave (compute/sampling.py).

_survey       (row, chunk)   each chunk's largest and smallest logit, and whether all are finite
_histogram    (row, chunk)   the number of tokens in each of BINS intervals of logits
_bound        (row)          the bins in which the last token can be
_gather       (row, chunk)   the weight of the tokens above these bins, and the tokens in these bins; if there
                             are many, a second histogram of these bins alone. In rows that have one, then:
  _bound_again, _gather      bound and gather again by the second histogram
search.py     (row)          the last token, by bisection of the gathered tokens

The weight of a token is 1 for top_k; for top_p it is its probability divided by the best token's. The
histograms only bound the weights of top_p, to leave few tokens; the choice depends on float64 sums in a fixed
order alone. With both filters, all tokens from top_k's bin on are gathered.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.backends.cuda.draws import DRAW_WORDS
from streamserve.execution.backends.cuda.kernels.search import BOTH, TOP_K, TOP_P, float64, search, weigh

CHUNK = 2048
"""Tokens of a program."""

BINS = 64

SLOTS = 256
"""Maximum tokens gathered from a chunk."""

CAPACITY = 4096
"""Maximum gathered tokens that a row is searched among. If a row has more (most of its logits are equal), or
more than SLOTS in a chunk, each step of the search reads the whole row instead."""

NARROW = 1024
"""Maximum tokens gathered without a second histogram."""

SLICE = 4096
"""Tokens read at a time in a search of a whole row."""

WARPS = {"survey": 4, "histogram": 4, "gather": 4, "search": 8}

REACH = tl.constexpr(64.0)
"""top_k never drops tokens with scores this far below the best: they weigh less than 2^-92 of its weight."""

PLAN = 8
"""Numbers of a row's plan: kind; first and last bin; whether there is a second histogram; first and last bin
in the second histogram."""

RANGE = 8
"""Numbers of a row's range: largest and smallest logit; start of the bins and bins per unit of logits, first
of the first histogram, then of the second one. -1 bins per unit: the row is not searched."""


class Survey(NamedTuple):
    """The largest and the smallest logit of each chunk, and whether all of its logits are finite: [rows,
    chunks] each. `counts` [rows, 2, BINS]: zeros, to be filled by the histograms."""

    peaks: Tensor
    lows: Tensor
    finite: Tensor
    counts: Tensor


@triton.jit
def _bin(logits, start, scale, BINS: tl.constexpr):
    """Return the bins of logits. Logits below the start are in bin 0."""
    return tl.minimum(tl.maximum(logits - start, 0.0) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _chunk(logits, draw, peak, vocabulary, CHUNK: tl.constexpr):
    """Return a chunk's tokens, their logits, and whether min_p leaves each token."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    searched = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, searched, 0.0)
    least = float64(draw + 4)
    if least > float("-inf"):
        temperature = float64(draw)
        bound = peak.to(tl.float64) / temperature + least
        searched = searched & (x.to(tl.float64) / temperature >= bound)
    return token, x, searched


@triton.jit
def _survey(
    logits, peaks, lows, finite, counts, vocabulary, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, inside, 0.0)
    chunk_index = row * tl.num_programs(1) + chunk
    tl.store(peaks + chunk_index, tl.max(tl.where(inside, x, float("-inf"))))
    tl.store(lows + chunk_index, tl.min(tl.where(inside, x, float("inf"))))
    tl.store(finite + chunk_index, tl.min((x - x == 0.0).to(tl.int32)))
    if chunk == 0:
        number = tl.arange(0, 2 * BINS)
        tl.store(counts + row * (2 * BINS) + number, tl.zeros([2 * BINS], tl.int32))


@triton.jit
def _store_range(
    draw, peaks, lows, finite, ranges, row, vocabulary, chunks,
    CHUNKS: tl.constexpr, BINS: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Store a row's range, and return its largest logit, the start of its bins and bins per unit of logits.

    For top_p, tokens with less than (1 - top_p) / vocabulary of the best token's weight are outside of the
    nucleus: together they weigh less than 1 - top_p of all tokens. The bound is half of that, so that
    rounding cannot matter.
    """
    chunk = tl.arange(0, CHUNKS)
    places, inside = row * chunks + chunk, chunk < chunks
    peak = tl.max(tl.load(peaks + places, inside, float("-inf")))
    low = tl.min(tl.load(lows + places, inside, float("inf")))
    temperature, top_p, top_k = float64(draw), float64(draw + 2), tl.load(draw + 10)
    by_count = (top_k > 0) & (top_k < vocabulary)
    reach = tl.where(by_count, REACH, tl.log(2.0 * vocabulary / tl.maximum(1.0 - top_p, 1e-16)))
    start = tl.maximum(peak - (reach * temperature).to(tl.float32), low)
    width = peak - start
    scale = tl.where(width > 1e-30, BINS / tl.maximum(width, 1e-30), 0.0)
    filtered = (by_count | (top_p < 1.0)) & (tl.min(tl.load(finite + places, inside, 1)) == 1)
    scale = tl.where(filtered, scale, -1.0)
    if tl.program_id(1) == 0:
        tl.store(ranges + row * RANGE, peak)
        tl.store(ranges + row * RANGE + 1, low)
        tl.store(ranges + row * RANGE + 2, start)
        tl.store(ranges + row * RANGE + 3, scale)
    return peak, start, scale


@triton.jit
def _histogram(
    logits, draws, peaks, lows, finite, ranges, counts, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr,
    RANGE: tl.constexpr,
):  # fmt: skip
    """Add a chunk's tokens to the first `counts`."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + row * DRAW_WORDS
    if tl.load(draw + 11) != 0:
        peak, start, scale = _store_range(
            draw, peaks, lows, finite, ranges, row, vocabulary, chunks, CHUNKS, BINS, RANGE
        )
        counts += row * (2 * BINS)
        below = tl.load(peaks + row * chunks + number) <= start
        if (scale >= 0.0) & below & (float64(draw + 4) == float("-inf")):
            tl.atomic_add(counts, tl.minimum(vocabulary - number * CHUNK, CHUNK), sem="relaxed")
        elif scale >= 0.0:
            _, x, searched = _chunk(logits, draw, peak, vocabulary, CHUNK)
            count = tl.histogram(_bin(x, start, scale, BINS), BINS, searched)
            tl.atomic_add(counts + tl.arange(0, BINS), count, count > 0, sem="relaxed")


@triton.jit
def _edges(count, start, scale, peak, temperature, bottom, BINS: tl.constexpr):
    """Return a lower and an upper bound of each bin's weight for top_p. Bin `bottom` also has all tokens
    below its edge, so its lower bound is 0."""
    number = tl.arange(0, BINS)
    offset = (start.to(tl.float64) - peak) / temperature
    step = tl.where(scale > 0.0, 1.0 / (tl.maximum(scale, 1e-30) * temperature), 0.0)
    least = tl.where(number == bottom, 0.0, count * tl.exp(offset + (number - 0.01) * step))
    return least, count * tl.exp(tl.minimum(offset + (number + 1.01) * step, 0.0))


@triton.jit
def _bound(
    draws, ranges, counts, plans,
    DRAW_WORDS: tl.constexpr, BINS: tl.constexpr, RANGE: tl.constexpr, PLAN: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Store a row's plan, and the range of its second histogram.

    The weights at a bin's edges bound the weights of its tokens. The tokens from some bin on reach top_p if
    (1 - top_p) · their weight >= top_p · the weight of all other tokens. top_k is ignored where it reaches
    tokens below the bins, which do not matter (REACH).
    """
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    if tl.load(draw + 11) != 0:
        ranges += row * RANGE
        plans += row * PLAN
        peak, low = tl.load(ranges), tl.load(ranges + 1)
        start, scale = tl.load(ranges + 2), tl.load(ranges + 3)
        number = tl.arange(0, BINS)
        count = tl.load(counts + row * (2 * BINS) + number)
        temperature, top_p, top_k = float64(draw), float64(draw + 2), tl.load(draw + 10)
        first = tl.max(tl.where(tl.cumsum(count, 0, reverse=True) >= top_k, number, 0))
        by_count = (top_k > 0) & (top_k < tl.sum(count)) & ((first > 0) | (start <= low))
        by_weight = top_p < 1.0
        last = tl.where(by_weight, BINS - 1, first)
        if by_weight & (by_count == 0):
            least, most = _edges(count, start, scale, peak, temperature, 0, BINS)
            least_above, most_above = tl.cumsum(least, 0, reverse=True), tl.cumsum(most, 0, reverse=True)
            least_below, most_below = tl.sum(least) - least_above, tl.sum(most) - most_above
            reaches = (1.0 - top_p) * least_above >= top_p * most_below
            can_reach = (1.0 - top_p) * most_above >= top_p * least_below
            first = tl.max(tl.where(reaches, number, 0))
            last = tl.max(tl.where(can_reach, number, 0))
        kind = tl.where(scale >= 0.0, by_count.to(tl.int32) + 2 * by_weight.to(tl.int32), 0)
        inside = tl.sum(tl.where((number >= first) & (number <= last), count, 0))
        tl.store(plans, kind)
        tl.store(plans + 1, first)
        tl.store(plans + 2, last)
        tl.store(plans + 3, ((inside > NARROW) & (kind != BOTH) & (scale > 0.0)).to(tl.int32))
        tl.store(ranges + 4, start + first / tl.maximum(scale, 1e-30))
        tl.store(ranges + 5, scale * BINS / (last - first + 1))


@triton.jit
def _bound_again(
    draws, ranges, counts, plans, weights, chunks,
    DRAW_WORDS: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, RANGE: tl.constexpr,
    PLAN: tl.constexpr,
):  # fmt: skip
    """Store the first and the last bin of the second histogram in which a row's last token can be. The weight
    of the tokens above the second histogram is known exactly."""
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    plans += row * PLAN
    if (tl.load(draw + 11) != 0) & (tl.load(plans + 3) != 0):
        ranges += row * RANGE
        number, chunk = tl.arange(0, BINS), tl.arange(0, CHUNKS)
        count = tl.load(counts + row * (2 * BINS) + BINS + number)
        total = tl.sum(tl.load(weights + (row * chunks + chunk) * 3, chunk < chunks, 0.0))
        above = tl.sum(tl.load(weights + (row * chunks + chunk) * 3 + 1, chunk < chunks, 0.0))
        bottom = tl.where(tl.load(plans + 1) > 0, -1, 0)
        least, most = _edges(
            count, tl.load(ranges + 4), tl.load(ranges + 5), tl.load(ranges), float64(draw), bottom, BINS
        )
        goal = float64(draw + 2) * total
        if tl.load(plans) == TOP_K:
            least = count.to(tl.float64)
            most = least
            goal = tl.load(draw + 10).to(tl.float64)
        reaches = above + tl.cumsum(least, 0, reverse=True) >= goal * (1.0 + 1e-12)
        can_reach = above + tl.cumsum(most, 0, reverse=True) >= goal * (1.0 - 1e-12)
        tl.store(plans + 4, tl.max(tl.where(reaches, number, 0)))
        tl.store(plans + 5, tl.max(tl.where(can_reach, number, 0)))


@triton.jit
def _gather(
    logits, draws, peaks, ranges, plans, counts, weights, members, sizes, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, SLOTS: tl.constexpr,
    RANGE: tl.constexpr, PLAN: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Store a chunk's weights and its tokens in the row's bins. `weights` [rows, chunks, 3]: the weight of
    the chunk, the weight above the row's bins, and the weight in them above the bins of the second histogram.
    `members` [rows, chunks, SLOTS]: the first tokens in the bins; `sizes` [rows, chunks]: their number. In
    rows with a second histogram, the first pass counts tokens, and the second one (AGAIN) stores them."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw, plan = draws + row * DRAW_WORDS, plans + row * PLAN
    if tl.load(draw + 11) != 0:
        kind, first, last, counted = (
            tl.load(plan),
            tl.load(plan + 1),
            tl.load(plan + 2),
            tl.load(plan + 3) != 0,
        )
        wanted = (kind > 0) & counted if AGAIN else kind > 0
        if wanted:
            chunk = row * chunks + number
            peak, start = tl.load(ranges + row * RANGE), tl.load(ranges + row * RANGE + 2)
            scale = tl.load(ranges + row * RANGE + 3)
            temperature, own_peak = float64(draw), tl.load(peaks + chunk)
            matters = _bin(own_peak, start, scale, BINS) >= first
            if not AGAIN:  # the total weight of top_p must not miss more than float64 rounding would lose
                matters = tl.where(kind == TOP_P, own_peak - peak >= -80.0 * temperature, matters)
            size = number * 0
            total = tl.full([], 0.0, tl.float64)
            above = total
            if matters:
                token, x, searched = _chunk(logits, draw, peak, vocabulary, CHUNK)
                own_bin = _bin(x, start, scale, BINS)
                gathered = searched & (own_bin >= first) & (own_bin <= last)
                higher = searched & (own_bin > last)
                own_bin = _bin(
                    x, tl.load(ranges + row * RANGE + 4), tl.load(ranges + row * RANGE + 5), BINS
                )  # in the second histogram
                if AGAIN:
                    higher = gathered & (own_bin > tl.load(plan + 5))
                    gathered = gathered & (own_bin >= tl.load(plan + 4)) & (own_bin <= tl.load(plan + 5))
                    above = tl.sum(weigh(x, higher, peak, temperature, kind))
                else:
                    weight = weigh(x, searched, peak, temperature, kind)
                    total = tl.sum(weight)
                    above = tl.sum(tl.where(higher, weight, 0.0))
                size = tl.sum(gathered.to(tl.int32))
                if (size > 0) & (counted == AGAIN):
                    slot = tl.cumsum(gathered.to(tl.int32)) - 1
                    tl.store(members + chunk * SLOTS + slot, token, gathered & (slot < SLOTS))
                elif size > 0:
                    count = tl.histogram(own_bin, BINS, gathered)
                    own_counts = counts + row * (2 * BINS) + BINS + tl.arange(0, BINS)
                    tl.atomic_add(own_counts, count, count > 0, sem="relaxed")
            tl.store(sizes + chunk, size)
            if AGAIN:
                tl.store(weights + chunk * 3 + 2, above)
            else:
                tl.store(weights + chunk * 3, total)
                tl.store(weights + chunk * 3 + 1, above)
                tl.store(weights + chunk * 3 + 2, 0.0)


def survey(logits: Tensor) -> Survey:
    """Return the statistics of `logits` [rows, vocabulary] from which `find_thresholds` starts."""
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    peaks, lows = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    finite = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    counts = torch.empty(rows, 2, BINS, dtype=torch.int32, device=logits.device)
    surveyed = Survey(peaks, lows, finite, counts)
    launch(
        _survey, (rows, chunks), {"logits": logits, "vocabulary": vocabulary, **surveyed._asdict()}, "survey"
    )
    return surveyed


def find_thresholds(logits: Tensor, draws: Tensor, surveyed: Survey) -> Tensor:
    """Return each row's threshold [rows], the lowest rank that stays. Overwrites the survey's counts."""
    rows, vocabulary = logits.shape
    chunks = surveyed.peaks.shape[1]

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    thresholds = scratch(torch.int64, rows)
    arguments = surveyed._asdict() | {
        "logits": logits, "draws": draws, "vocabulary": vocabulary, "chunks": chunks,
        "thresholds": thresholds,
        "ranges": scratch(torch.float32, rows, RANGE), "plans": scratch(torch.int32, rows, PLAN),
        "weights": scratch(torch.float64, rows, chunks, 3), "sizes": scratch(torch.int32, rows, chunks),
        "members": scratch(torch.int32, rows, chunks, SLOTS),
    }  # fmt: skip
    launch(_histogram, (rows, chunks), arguments, "histogram")
    launch(_bound, (rows,), arguments)
    launch(_gather, (rows, chunks), arguments, "gather", AGAIN=False)
    launch(_bound_again, (rows,), arguments)
    launch(_gather, (rows, chunks), arguments, "gather", AGAIN=True)
    launch(search, (rows,), arguments, "search")
    return thresholds


def launch(
    kernel, grid: tuple[int, ...], arguments: dict[str, Tensor | int], name: str = "", **options: bool
):
    """Launch a kernel with the arguments and compile-time sizes that its parameters name."""
    values = kernel_sizes(arguments["vocabulary"]) | arguments | options
    warps = WARPS.get(name, 1)
    kernel[grid](**{name: values[name] for name in kernel.arg_names}, num_warps=warps)


def kernel_sizes(vocabulary: int) -> dict[str, int]:
    """Return the compile-time sizes of kernels for a vocabulary."""
    chunks = triton.next_power_of_2(triton.cdiv(vocabulary, CHUNK))
    return {
        "DRAW_WORDS": DRAW_WORDS, "CHUNK": CHUNK, "CHUNKS": chunks, "BINS": BINS, "RANGE": RANGE,
        "PLAN": PLAN, "NARROW": NARROW, "SLOTS": SLOTS, "CAPACITY": CAPACITY, "SLICE": SLICE,
        "TOKEN_BITS": vocabulary.bit_length(),
    }  # fmt: skip
