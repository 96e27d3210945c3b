"""Find the last token of a row that passes its filters, by bisection (kernels/filters.py)."""
# mypy: ignore-errors

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**62))
"""A rank below the ranks of all tokens."""

TOP_K, TOP_P, BOTH = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Kinds of filters of a row; 0: none."""


@triton.jit
def float64(words):
    """Return the float64 in two words of a draw."""
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (low | (high << 32)).to(tl.float64, bitcast=True)


@triton.jit
def _key(logits):
    """Return integers that have the order of the float32 `logits`; 0 and -0 are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(logits == 0.0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank(logits, token, TOKEN_BITS: tl.constexpr):
    """Return the ranks of tokens: integers that are larger for larger logits, and among equal logits for
    lower ids."""
    return (_key(logits).to(tl.int64) << TOKEN_BITS) - token


@triton.jit
def weigh(logits, live, peak, temperature, kind):
    """Return the weights of tokens: 1 for TOP_K, otherwise proportional to the probability. Tokens that are
    not `live` have the weight 0."""
    if kind == TOP_K:
        weights = live.to(tl.float64)
    else:
        weights = tl.where(live, tl.exp((logits.to(tl.float64) - peak) * (1.0 / temperature)), 0.0)
    return weights


@triton.jit
def _bisect(ranks, weights, above, goal):
    """Return the threshold rank: the tokens with at least this rank, plus the weight `above`, reach the goal;
    without the lowest of these tokens they do not."""
    lower, upper = tl.min(tl.where(weights > 0.0, ranks, -LOWEST)), tl.max(ranks) + 1
    between = 2
    while (upper - lower > 1) & (between > 1):
        # Tokens of rank `lower` and higher reach the goal, tokens of rank `upper` and higher do not.
        for _ in tl.static_range(4):
            middle = lower + ((upper - lower) >> 1)
            enough = above + tl.sum(tl.where(ranks >= middle, weights, 0.0)) >= goal
            upper = tl.where(enough, upper, middle)
            lower = tl.where(enough, middle, lower)
            upper = tl.maximum(upper, lower + 1)
        between = tl.sum(((ranks >= lower) & (ranks < upper)).to(tl.int32))
    return lower


@triton.jit
def _member(members, ends, slot, chunks, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """Return the members number `slot` of a row, in order of the chunks, and whether they exist. `ends` has
    the cumulative number of members up to each chunk."""
    owner = slot * 0
    step = CHUNKS // 2
    while step > 0:
        end = tl.load(ends + owner + step - 1, owner + step <= chunks, 2147483647)
        owner = tl.where(end <= slot, owner + step, owner)
        step = step // 2
    live = (owner < chunks) & (slot < tl.load(ends + chunks - 1))
    begin = tl.load(ends + owner - 1, live & (owner > 0), 0)
    return tl.load(members + owner * SLOTS + slot - begin, live, 0), live


@triton.jit
def _search_members(
    logits, draw, weights, members, ends, peak, kind, chunks,
    CHUNKS: tl.constexpr, SLOTS: tl.constexpr, READ: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """Return the threshold rank, found among the row's first READ members, and whether it is right. Rounding
    or wrong bounds could make it wrong."""
    token, live = _member(members, ends, tl.arange(0, READ), chunks, CHUNKS, SLOTS)
    x = tl.load(logits + token, live, 0.0)
    ranks = tl.where(live, rank(x, token, TOKEN_BITS), LOWEST)
    temperature = float64(draw)
    chunk = tl.arange(0, CHUNKS)
    parts = weights + chunk * 3
    total = tl.sum(tl.load(parts, chunk < chunks, 0.0))
    above = tl.sum(tl.load(parts + 1, chunk < chunks, 0.0) + tl.load(parts + 2, chunk < chunks, 0.0))
    threshold = tl.full([], LOWEST, tl.int64)
    right = kind > 0
    if kind != TOP_P:
        goal = tl.load(draw + 10).to(tl.float64)
        right = (above < goal) & (above + tl.sum(live.to(tl.float64)) >= goal)
        threshold = _bisect(ranks, live.to(tl.float64), above, goal)
    if kind != TOP_K:
        weight = weigh(x, live & (ranks >= threshold), peak, temperature, kind)
        if kind == BOTH:
            total = tl.sum(weight)
        goal = float64(draw + 2) * total
        right = right & (above < goal) & (above + tl.sum(weight) >= goal)
        threshold = _bisect(ranks, weight, above, goal)
    return threshold, right


@triton.jit
def _weight_from(
    logits, vocabulary, peak, temperature, lowest, kind, SLICE: tl.constexpr, TOKEN_BITS: tl.constexpr
):
    """Return the weight of a row's tokens with at least the rank `lowest`."""
    weight = tl.zeros([SLICE], tl.float64)
    for start in range(0, vocabulary, SLICE):
        token = start + tl.arange(0, SLICE)
        x = tl.load(logits + token, token < vocabulary, 0.0)
        fits = (token < vocabulary) & (rank(x, token, TOKEN_BITS) >= lowest)
        weight += weigh(x, fits, peak, temperature, kind)
    return tl.sum(weight)


@triton.jit
def _search_row(
    logits, vocabulary, peak, low, temperature, goal, lowest, kind,
    SLICE: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """Return the largest rank, at least `lowest`, such that the row's tokens with at least this rank reach
    the goal."""
    lower = tl.maximum(rank(low, vocabulary, TOKEN_BITS), lowest)
    upper = rank(peak, 0, TOKEN_BITS) + 1
    while upper - lower > 1:
        middle = lower + ((upper - lower) >> 1)
        enough = _weight_from(logits, vocabulary, peak, temperature, middle, kind, SLICE, TOKEN_BITS) >= goal
        lower = tl.where(enough, middle, lower)
        upper = tl.where(enough, upper, middle)
    return lower


@triton.jit
def _lowest_rank(draw, peak, vocabulary, TOKEN_BITS: tl.constexpr):
    """Return the lowest rank of tokens with at least min_p times the best token's probability."""
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
def search(
    logits, draws, ranges, plans, weights, members, sizes, thresholds, vocabulary, chunks,
    DRAW_WORDS: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, CAPACITY: tl.constexpr,
    SLICE: tl.constexpr, RANGE: tl.constexpr, PLAN: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """Store a row's threshold rank: tokens with at least this rank pass the filters. `sizes` are replaced by
    their cumulative sums."""
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * DRAW_WORDS
    threshold = tl.full([], LOWEST, tl.int64)
    if tl.load(draw + 11) != 0:
        logits += row * vocabulary
        sizes += row * chunks
        peak, low = tl.load(ranges + row * RANGE), tl.load(ranges + row * RANGE + 1)
        kind, chunk = tl.load(plans + row * PLAN), tl.arange(0, CHUNKS)
        lowest = _lowest_rank(draw, peak, vocabulary, TOKEN_BITS)
        if kind > 0:
            size = tl.load(sizes + chunk, chunk < chunks, 0)
            most, gathered = tl.max(size), tl.sum(size)
            tl.debug_barrier()
            tl.store(sizes + chunk, tl.cumsum(size), chunk < chunks)
            tl.debug_barrier()
            weights += row * chunks * 3
            members += row * chunks * SLOTS
            FEW: tl.constexpr = CAPACITY // 4
            right = most < 0
            if (most <= SLOTS) & (gathered <= FEW):
                threshold, right = _search_members(
                    logits, draw, weights, members, sizes, peak, kind, chunks, CHUNKS, SLOTS, FEW, TOKEN_BITS
                )
            elif (most <= SLOTS) & (gathered <= CAPACITY):
                threshold, right = _search_members(
                    logits, draw, weights, members, sizes, peak, kind, chunks, CHUNKS, SLOTS, CAPACITY,
                    TOKEN_BITS,
                )  # fmt: skip
            if not right:
                threshold = lowest
                temperature = float64(draw)
                if kind != TOP_P:
                    goal = tl.load(draw + 10).to(tl.float64)
                    threshold = _search_row(
                        logits, vocabulary, peak, low, temperature, goal, threshold, TOP_K, SLICE, TOKEN_BITS
                    )
                if kind != TOP_K:
                    total = _weight_from(
                        logits, vocabulary, peak, temperature, threshold, kind, SLICE, TOKEN_BITS
                    )
                    goal = float64(draw + 2) * total
                    threshold = _search_row(
                        logits, vocabulary, peak, low, temperature, goal, threshold, kind, SLICE, TOKEN_BITS
                    )
        threshold = tl.maximum(threshold, lowest)
    tl.store(thresholds + row, threshold)
