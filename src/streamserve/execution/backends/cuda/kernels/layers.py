"""The operations between matrix products, as Triton kernels: each reads and writes its rows once."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.model.spec import Clamp

ELEMENTS = 1024
"""Elements of a program of an elementwise kernel."""


@triton.jit
def _gather_tokens(tokens, results, sources, out, rows, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = row < rows
    source = tl.load(sources + row, inside, -1)
    token = tl.load(tokens + row, inside, 0)
    fed = tl.load(results + source, inside & (source >= 0), 0)
    tl.store(out + row, tl.where(source >= 0, fed, token), inside)


@triton.jit
def _embed(table, tokens, out, multiplier, HIDDEN: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr):
    row = tl.program_id(0)
    token = tl.maximum(tl.load(tokens + row), 0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < HIDDEN
    values = tl.load(table + token * HIDDEN + column, inside)
    if SCALED:
        values = (values.to(tl.float32) * multiplier).to(values.dtype)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, values, inside)


@triton.jit
def _normed(full, scale, weights, dtype: tl.constexpr):
    """Return the product of `full` (float32) and `scale`, rounded to the dtype of the `weights`, times the
    `weights`."""
    return (weights.to(tl.float32) * (full * scale).to(weights.dtype).to(tl.float32)).to(dtype)


@triton.jit
def _add_rms_norm(
    hidden, delta, weight, post_norm, out, epsilon, multiplier,
    N: tl.constexpr, PADDED_N: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_N)
    inside = column < N
    x = tl.load(hidden + row * N + column, inside, 0.0)
    if ADD:
        added = tl.load(delta + row * N + column, inside, 0.0).to(tl.float32)
        if POST:
            weights = tl.load(post_norm + column, inside, 0.0)
            root = 1.0 / tl.sqrt_rn(tl.sum(added * added, 0) / N + epsilon)
            added = _normed(added, root, weights, x.dtype).to(tl.float32)
        if SCALED:
            added = (added * multiplier).to(x.dtype).to(tl.float32)
        x = (x.to(tl.float32) + added).to(x.dtype)
        tl.store(hidden + row * N + column, x, inside)
    if NORM:
        full = x.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(full * full, 0) / N + epsilon)
        x = _normed(full, scale, tl.load(weight + column, inside, 0.0), x.dtype)
    if WRITE:
        tl.store(out + row * N + column, x, inside)


@triton.jit
def _norm_jointly(
    qkv, weight, epsilon, stride, FIRST: tl.constexpr, LAST: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Normalize the queries (program 0 of a row) or the keys (program 1)."""
    row, keys = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    begin = tl.where(keys, FIRST, 0)
    size = tl.where(keys, LAST - FIRST, FIRST)
    column = tl.arange(0, PADDED)
    inside = column < size
    vector = qkv + row * stride + begin + column
    x = tl.load(vector, inside, 0.0)
    full = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(full * full, 0) / size + epsilon)
    tl.store(vector, _normed(full, scale, tl.load(weight + begin + column, inside, 0.0), x.dtype), inside)


@triton.jit
def _rounded_product(a, b):
    """Return a * b rounded to their dtype, as float32: plain torch rounds products before it adds them."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit
def _squares(x):
    return tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)


@triton.jit
def _normed_heads(x, weights, scale, normed):
    """Return `x` times `scale` [heads] and `weights` in the heads that are `normed`, and `x` in the
    others."""
    return tl.where(normed, _normed(x.to(tl.float32), scale[:, None], weights, x.dtype), x)


@triton.jit
def _peak(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _infinite(x):
    """Return, for each head, the number of values that are not finite."""
    zeros = x.to(tl.float32) * 0.0
    return tl.sum(tl.where(zeros == 0.0, 0, 1), 1)


@triton.jit
def _integers(x, scale):
    """Return `x` divided by `scale` [heads], rounded to the nearest integer, ties to even; 0 where the scale
    is 0 or NaN. Adding 1.5 * 2^23 leaves no bits after the binary point."""
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    ratio = tl.where(
        (scale > 0.0)[:, None], tl.div_rn(x.to(tl.float32), divisor + x.to(tl.float32) * 0.0), 0.0
    )
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _rotate_and_store(
    qkv, head_norm, cos, sin, positions, cache, cache_scales, slots, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    ROTATE: tl.constexpr, QUANTIZED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate GROUP heads of a row, and store keys and values in the cache. A head has two
    halves of TURNED / 2 dimensions that are rotated with each other, and up to REST that are not rotated."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    half = tl.arange(0, HALF)
    PAIRS: tl.constexpr = TURNED // 2
    live = (head < HEADS + 2 * KV_HEADS)[:, None]
    inside = live & (half < PAIRS)[None, :]
    start = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM
    source = start + half[None, :]
    first = tl.load(source, inside, 0.0)
    second = tl.load(source + PAIRS, inside, 0.0)
    turned = inside & (head < HEADS + KV_HEADS)[:, None]
    if REST > 0:
        other = TURNED + tl.arange(0, REST)
        others = live & (other < DIM)[None, :]
        rest = tl.load(start + other[None, :], others, 0.0)
    if NORM:
        squares = _squares(first) + _squares(second)
        if REST > 0:
            squares += _squares(rest)
        scale = 1.0 / tl.sqrt_rn(squares / DIM + epsilon)
        weights = head_norm + head[:, None] * DIM
        first = _normed_heads(first, tl.load(weights + half[None, :], turned, 0.0), scale, turned)
        second = _normed_heads(second, tl.load(weights + half[None, :] + PAIRS, turned, 0.0), scale, turned)
        if REST > 0:
            normed = others & (head < HEADS + KV_HEADS)[:, None]
            rest = _normed_heads(rest, tl.load(weights + other[None, :], normed, 0.0), scale, normed)
    if ROTATE:
        position = tl.load(positions + row).to(tl.int64)
        c = tl.load(cos + position * PAIRS + half, half < PAIRS, 1.0)[None, :]
        s = tl.load(sin + position * PAIRS + half, half < PAIRS, 0.0)[None, :]
        r1 = (_rounded_product(first, c) - _rounded_product(second, s)).to(first.dtype)
        r2 = (_rounded_product(second, c) + _rounded_product(first, s)).to(first.dtype)
        first = tl.where(turned, r1, first)
        second = tl.where(turned, r2, second)
    query = inside & (head < HEADS)[:, None]
    tl.store(source, first, query)
    tl.store(source + PAIRS, second, query)
    slot = tl.load(slots + row).to(tl.int64)
    # Value heads follow the key heads in qkv as they do in a block, so `head - HEADS` is the place in both.
    vector = ((slot // BLOCK_SIZE) * 2 * KV_HEADS + head - HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    stored = inside & (head >= HEADS)[:, None]
    WIDTH: tl.constexpr = DIM + 4 * QUANTIZED
    target = cache + vector[:, None] * WIDTH
    if QUANTIZED:
        peak = tl.maximum(_peak(first), _peak(second))
        infinite = _infinite(first) + _infinite(second)
        if REST > 0:
            peak = tl.maximum(peak, _peak(rest))
            infinite += _infinite(rest)
        scale = tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32))
        scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
        scale = tl.where(infinite > 0, float("nan"), scale)
        kept = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
        tl.store(cache_scales + vector * (WIDTH // 4) + DIM // 4, scale, kept)
        tl.store(target + half[None, :], _integers(first, scale), stored)
        tl.store(target + half[None, :] + PAIRS, _integers(second, scale), stored)
    else:
        tl.store(target + half[None, :], first, stored)
        tl.store(target + half[None, :] + PAIRS, second, stored)
    if REST > 0:
        tl.store(start + other[None, :], rest, others & (head < HEADS)[:, None])
        remaining = others & (head >= HEADS)[:, None]
        if QUANTIZED:
            tl.store(target + other[None, :], _integers(rest, scale), remaining)
        else:
            tl.store(target + other[None, :], rest, remaining)


@triton.jit
def _gate(
    gate_up, out, limit, alpha,
    N: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < N
    gate = tl.load(gate_up + row * 2 * N + column, inside, 0.0)
    up = tl.load(gate_up + row * 2 * N + N + column, inside, 0.0)
    full = gate.to(tl.float32)
    values = up.to(tl.float32)
    if CLAMPED:
        full = tl.minimum(full, limit).to(gate.dtype).to(tl.float32)
        values = tl.minimum(tl.maximum(values, -limit), limit).to(gate.dtype).to(tl.float32)
        values = (values + 1.0).to(gate.dtype).to(tl.float32)
        bent = (full * alpha).to(gate.dtype).to(tl.float32)
        share = (1.0 / (1.0 + tl.exp(-bent))).to(gate.dtype).to(tl.float32)
        active = full * share
    elif SILU:
        active = full / (1.0 + tl.exp(-full))
    else:  # 1 + tanh(x) = 2 / (1 + exp(-2 x))
        inner = 0.7978845608028654 * (full + 0.044715 * full * full * full)
        active = full / (1.0 + tl.exp(-2.0 * inner))
    product = (active.to(gate.dtype).to(tl.float32) * values).to(gate.dtype)
    tl.store(out + row * N + column, product, inside)


def gather_tokens(tokens: Tensor, results: Tensor, sources: Tensor) -> Tensor:
    """See `plain.layers.gather_tokens`."""
    out = torch.empty_like(tokens)
    rows = len(tokens)
    _gather_tokens[(triton.cdiv(rows, 256),)](tokens, results, sources, out, rows, SIZE=256)
    return out


def embed(table: Tensor, tokens: Tensor, multiplier: float = 1.0) -> Tensor:
    """See `plain.layers.embed`."""
    hidden = table.shape[1]
    out = torch.empty(len(tokens), hidden, dtype=table.dtype, device=table.device)
    _embed[(len(tokens), triton.cdiv(hidden, ELEMENTS))](
        table, tokens, out, multiplier, HIDDEN=hidden, SIZE=ELEMENTS, SCALED=multiplier != 1
    )
    return out


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    out: Tensor | None = None,
    post_norm: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """See `plain.layers.add_rms_norm`."""
    rows, n = hidden.shape
    if out is None:
        out = hidden if weight is None else torch.empty_like(hidden)
    if delta is None and weight is None and out is hidden:
        return hidden
    padded, unused = triton.next_power_of_2(n), hidden
    _add_rms_norm[(rows,)](
        hidden, unused if delta is None else delta, unused if weight is None else weight,
        unused if post_norm is None else post_norm, out, epsilon, multiplier,
        N=n, PADDED_N=padded, ADD=delta is not None, POST=post_norm is not None,
        SCALED=post_norm is None and multiplier != 1, NORM=weight is not None, WRITE=out is not hidden,
        num_warps=_warps(padded), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def norm_jointly(qkv: Tensor, weight: Tensor, epsilon: float, heads: int) -> None:
    """See `plain.layers.norm_jointly`."""
    first, last = heads * weight.shape[1], weight.numel()
    padded = triton.next_power_of_2(max(first, last - first))
    _norm_jointly[(len(qkv), 2)](
        qkv, weight, epsilon, qkv.stride(0), FIRST=first, LAST=last, PADDED=padded, num_warps=_warps(padded)
    )


def rotate_and_store(
    qkv: Tensor,
    head_norm: Tensor | None,
    epsilon: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    cache_layer: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    """See `plain.layers.rotate_and_store`. Raises ValueError for quantized vectors whose number of dimensions
    is not a multiple of 4."""
    block_size, width = cache_layer.shape[3:]
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    quantized = width != dim
    if quantized and dim % 4:
        raise ValueError("8-bit keys and values need a multiple of 4 dimensions a head")
    turned, rest = (dim, 0) if cos is None else (2 * cos.shape[1], dim - 2 * cos.shape[1])
    _rotate_and_store[(len(qkv), triton.cdiv(heads + 2 * kv_heads, 8))](
        qkv, qkv if head_norm is None else head_norm, qkv if cos is None else cos,
        qkv if sin is None else sin, positions, cache_layer,
        cache_layer.view(torch.float32) if quantized else cache_layer, slots, epsilon,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, TURNED=turned, HALF=triton.next_power_of_2(turned // 2),
        REST=triton.next_power_of_2(rest) if rest else 0, BLOCK_SIZE=block_size, NORM=head_norm is not None,
        ROTATE=cos is not None, QUANTIZED=quantized, GROUP=8, num_warps=4 if quantized else 2,
        enable_fp_fusion=False,
    )  # fmt: skip


def gate(gate_up: Tensor, activation: str = "silu", clamp: Clamp | None = None) -> Tensor:
    """See `plain.layers.gate`."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    limit, alpha = (clamp.limit, clamp.alpha) if clamp else (0.0, 0.0)
    _gate[(rows, triton.cdiv(n, ELEMENTS))](
        gate_up, out, limit, alpha,
        N=n, SIZE=ELEMENTS, SILU=activation == "silu", CLAMPED=clamp is not None,
    )  # fmt: skip
    return out


def _warps(elements: int) -> int:
    return min(max(elements // 512, 1), 16)
