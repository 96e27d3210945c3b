"""The operations between matrix products, in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from streamserve.execution.rope import rotate


def gather_tokens(tokens: Tensor, results: Tensor, sources: Tensor) -> Tensor:
    """Return `tokens` [rows]; where `sources[row]` is not negative, `results[sources[row]]` instead."""
    fed = results[sources.clamp(min=0)]
    return torch.where(sources >= 0, fed, tokens)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Return rows `tokens` of `table` [vocabulary, hidden]; a negative token counts as 0."""
    return table[tokens.clamp(min=0)]


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor | None = None
) -> Tensor:
    """Add `delta` to `hidden` [rows, n] in place, and return RMSNorm of the sum, scaled by `weight` [n]: in
    float32 up to the scaling."""
    if delta is not None:
        hidden += delta
    out = torch.empty_like(hidden) if out is None else out
    return out.copy_(rms_norm(hidden, weight, epsilon))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm over the last dimension of `x`, as execution.model.Model computes it."""
    full = x.float()
    scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (full * scale).to(x.dtype)


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
    """Norm the heads of queries and keys (where there is a `head_norm` [heads + kv_heads, dim]), rotate them
    by `cos` and `sin` [positions, dim / 2], and store keys and values at `slots` of `cache_layer` [blocks,
    k|v, kv head, slot, dim]. The queries stay in `qkv` [rows, (heads + 2 kv_heads) dim]."""
    block_size, dim = cache_layer.shape[3:]
    split = qkv.view(len(qkv), -1, dim)
    qk = split[:, : heads + kv_heads]
    if head_norm is not None:
        qk = rms_norm(qk, head_norm, epsilon)
    rotated = rotate(qk, cos[positions], sin[positions])
    split[:, :heads] = rotated[:, :heads]
    block, slot = slots.long() // block_size, slots.long() % block_size
    cache_layer[block, 0, :, slot] = rotated[:, heads:]
    cache_layer[block, 1, :, slot] = split[:, heads + kv_heads :]


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for `gate_up` [rows, 2 n], the gates first: [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
