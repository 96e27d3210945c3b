"""The operations between matrix products, as Triton kernels: each reads and writes its rows once."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.cuda.kernels.example import KernelExample

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
def _embed(table, tokens, out, HIDDEN: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    token = tl.maximum(tl.load(tokens + row), 0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < HIDDEN
    values = tl.load(table + token * HIDDEN + column, inside)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, values, inside)


@triton.jit
def _add_rms_norm(
    hidden, delta, weight, out, epsilon, N: tl.constexpr, PADDED_N: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_N)
    inside = column < N
    x = tl.load(hidden + row * N + column, inside, 0.0)
    scales = tl.load(weight + column, inside, 0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + row * N + column, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + row * N + column, x, inside)
    full = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(full * full, 0) / N + epsilon)
    normed = (full * scale).to(x.dtype)
    tl.store(out + row * N + column, (scales.to(tl.float32) * normed.to(tl.float32)).to(x.dtype), inside)


@triton.jit
def _rounded_product(a, b):
    """a * b in their dtype: the product is rounded before it is added to another."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit
def _rotate_and_store(
    qkv, head_norm, cos, sin, positions, cache, slots, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    half = tl.arange(0, HALF)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (half < DIM // 2)[None, :]
    source = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + half[None, :]
    first = tl.load(source, inside, 0.0)
    second = tl.load(source + DIM // 2, inside, 0.0)
    turned = inside & (head < HEADS + KV_HEADS)[:, None]
    if NORM:
        squares = first.to(tl.float32) * first.to(tl.float32) + second.to(tl.float32) * second.to(tl.float32)
        scale = (1.0 / tl.sqrt_rn(tl.sum(squares, 1) / DIM + epsilon))[:, None]
        weights = head_norm + head[:, None] * DIM + half[None, :]
        w1 = tl.load(weights, turned, 0.0)
        w2 = tl.load(weights + DIM // 2, turned, 0.0)
        n1 = (first.to(tl.float32) * scale).to(first.dtype).to(tl.float32)
        n2 = (second.to(tl.float32) * scale).to(first.dtype).to(tl.float32)
        first = tl.where(turned, (w1.to(tl.float32) * n1).to(first.dtype), first)
        second = tl.where(turned, (w2.to(tl.float32) * n2).to(first.dtype), second)
    position = tl.load(positions + row).to(tl.int64)
    c = tl.load(cos + position * (DIM // 2) + half, half < DIM // 2, 1.0)[None, :]
    s = tl.load(sin + position * (DIM // 2) + half, half < DIM // 2, 0.0)[None, :]
    r1 = (_rounded_product(first, c) - _rounded_product(second, s)).to(first.dtype)
    r2 = (_rounded_product(second, c) + _rounded_product(first, s)).to(first.dtype)
    first = tl.where(turned, r1, first)
    second = tl.where(turned, r2, second)
    query = inside & (head < HEADS)[:, None]
    tl.store(source, first, query)
    tl.store(source + DIM // 2, second, query)
    slot = tl.load(slots + row).to(tl.int64)
    # Key heads follow the query heads, value heads follow them: numbered on, as [k|v][head] in a block.
    vector = ((slot // BLOCK_SIZE) * 2 * KV_HEADS + head - HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    stored = inside & (head >= HEADS)[:, None]
    tl.store(cache + vector[:, None] * DIM + half[None, :], first, stored)
    tl.store(cache + vector[:, None] * DIM + half[None, :] + DIM // 2, second, stored)


@triton.jit
def _swiglu(gate_up, out, N: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < N
    gate = tl.load(gate_up + row * 2 * N + column, inside, 0.0)
    up = tl.load(gate_up + row * 2 * N + N + column, inside, 0.0)
    full = gate.to(tl.float32)
    active = (full / (1.0 + tl.exp(-full))).to(gate.dtype)
    product = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * N + column, product, inside)


def gather_tokens(tokens: Tensor, results: Tensor, sources: Tensor) -> Tensor:
    """As plain.layers.gather_tokens."""
    out = torch.empty_like(tokens)
    rows = len(tokens)
    _gather_tokens[(triton.cdiv(rows, 256),)](tokens, results, sources, out, rows, SIZE=256)
    return out


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """As plain.layers.embed."""
    hidden = table.shape[1]
    out = torch.empty(len(tokens), hidden, dtype=table.dtype, device=table.device)
    _embed[(len(tokens), triton.cdiv(hidden, ELEMENTS))](table, tokens, out, HIDDEN=hidden, SIZE=ELEMENTS)
    return out


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor | None = None
) -> Tensor:
    """As plain.layers.add_rms_norm."""
    rows, n = hidden.shape
    out = torch.empty_like(hidden) if out is None else out
    padded = triton.next_power_of_2(n)
    _add_rms_norm[(rows,)](
        hidden, hidden if delta is None else delta, weight, out, epsilon,
        N=n, PADDED_N=padded, ADD=delta is not None, num_warps=_warps(padded),
    )  # fmt: skip
    return out


def rotate_and_store(
    qkv: Tensor,
    head_norm: Tensor | None,
    epsilon: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache_layer: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    """As plain.layers.rotate_and_store."""
    block_size, dim = cache_layer.shape[3:]
    _rotate_and_store[(len(qkv), triton.cdiv(heads + 2 * kv_heads, 8))](
        qkv, qkv if head_norm is None else head_norm, cos, sin, positions, cache_layer, slots, epsilon,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=block_size, NORM=head_norm is not None, GROUP=8, num_warps=2,
    )  # fmt: skip


def swiglu(gate_up: Tensor) -> Tensor:
    """As plain.layers.swiglu."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(n, ELEMENTS))](gate_up, out, N=n, SIZE=ELEMENTS)
    return out


def _warps(elements: int) -> int:
    return min(max(elements // 512, 1), 16)


def examples(capability: int) -> list[KernelExample]:
    """Return the launches of a model with 4096 hidden dimensions, the same on any device."""
    b, i = "*bf16", "*i32"
    norm = dict.fromkeys(("hidden", "delta", "weight", "out"), b) | {"epsilon": "fp32"}
    rotation = dict.fromkeys(("qkv", "head_norm", "cos", "sin", "cache"), b)
    rotation |= {"positions": i, "slots": i, "epsilon": "fp32"}
    heads = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF": 64, "BLOCK_SIZE": 16, "GROUP": 8}
    gather = dict.fromkeys(("tokens", "results", "sources", "out"), i) | {"rows": "i32"}
    return [
        KernelExample("gather_tokens", _gather_tokens, gather, {"SIZE": 256}),
        KernelExample(
            "embed", _embed, {"table": b, "tokens": i, "out": b}, {"HIDDEN": 4096, "SIZE": ELEMENTS}
        ),
        KernelExample("add_rms_norm", _add_rms_norm, norm, {"N": 4096, "PADDED_N": 4096, "ADD": True}, 8),
        KernelExample("rotate_and_store", _rotate_and_store, rotation, heads | {"NORM": False}, 2),
        KernelExample("rotate_and_store, normed", _rotate_and_store, rotation, heads | {"NORM": True}, 2),
        KernelExample("swiglu", _swiglu, {"gate_up": b, "out": b}, {"N": 14336, "SIZE": ELEMENTS}),
    ]
