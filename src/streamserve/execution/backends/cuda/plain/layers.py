"""The operations between matrix products, in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from streamserve.execution.compute.kv_vectors import quantize_vectors
from streamserve.execution.model.rope import rotate
from streamserve.execution.model.spec import Clamp


def gather_tokens(tokens: Tensor, results: Tensor, sources: Tensor) -> Tensor:
    """Return `tokens` [rows], with `results[sources[row]]` in their place where `sources[row]` is not
    negative."""
    fed = results[sources.clamp(min=0)]
    return torch.where(sources >= 0, fed, tokens)


def embed(table: Tensor, tokens: Tensor, multiplier: float = 1.0) -> Tensor:
    """Return the rows `tokens` of `table` [vocabulary, hidden] times `multiplier`. A negative token counts as
    0."""
    rows = table[tokens.clamp(min=0)]
    return rows if multiplier == 1 else rows * multiplier


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    out: Tensor | None = None,
    post_norm: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Add `delta` to `hidden` [rows, n] in place, and return the RMSNorm of the sum with `weight` [n];
    without a weight, return the sum. Before the addition, `delta` is normalized with the weight `post_norm`
    [n], or without one multiplied by `multiplier`."""
    if delta is not None:
        if post_norm is not None:
            delta = rms_norm(delta, post_norm, epsilon)
        hidden += delta if multiplier == 1 or post_norm is not None else delta * multiplier
    normed = hidden if weight is None else rms_norm(hidden, weight, epsilon)
    return normed if out is None else out.copy_(normed)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm over the last dimension of `x`. As in model.forward.Model, the normalized numbers
    are rounded to the dtype of `weight` before they are multiplied by it."""
    full = x.float()
    scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + epsilon)
    return (weight * (full * scale).to(weight.dtype)).to(x.dtype)


def norm_jointly(qkv: Tensor, weight: Tensor, epsilon: float, heads: int) -> None:
    """Normalize all queries of each row of `qkv` [rows, all heads x dim] as one vector, and all keys as
    another, in place. `weight` is [heads + kv heads, dim]."""
    dim = weight.shape[1]
    first, last = heads * dim, weight.numel()
    for part in (slice(0, first), slice(first, last)):
        qkv[:, part] = rms_norm(qkv[:, part], weight.flatten()[part], epsilon)


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
    """Normalize and rotate queries and keys, and store keys and values in the cache. The queries stay in
    `qkv` [rows, (heads + 2 kv_heads) dim].

    * `head_norm` [heads + kv_heads, dim]: the norm of each head; None: no norm.
    * `cos`, `sin` [positions, rotated / 2]: rotate the first dimensions of each head; None: no rotation.
    * Keys and values are stored at `slots` of `cache_layer` [blocks, k|v, kv head, slot, vector]. They are
      quantized if a vector is longer than dim (execution/compute/kv_vectors.py).
    """
    block_size = cache_layer.shape[3]
    split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    qk = split[:, : heads + kv_heads]
    if head_norm is not None:
        qk = rms_norm(qk, head_norm, epsilon)
    if cos is not None and sin is not None:
        qk = rotate(qk, cos[positions], sin[positions])
    split[:, :heads] = qk[:, :heads]
    keys, values = qk[:, heads:], split[:, heads + kv_heads :]
    if cache_layer.shape[-1] != split.shape[-1]:
        keys, values = quantize_vectors(keys), quantize_vectors(values)
    block, slot = slots.long() // block_size, slots.long() % block_size
    cache_layer[block, 0, :, slot] = keys
    cache_layer[block, 1, :, slot] = values


def gate(gate_up: Tensor, activation: str = "silu", clamp: Clamp | None = None) -> Tensor:
    """Return the products [rows, n] of activated gates and values, which are the two halves of `gate_up`
    [rows, 2 n]. `clamp`: their bounds (spec.Clamp)."""
    gates, values = gate_up.chunk(2, dim=-1)
    if clamp:
        gates, values = gates.clamp(max=clamp.limit), values.clamp(-clamp.limit, clamp.limit)
        return (values + 1) * (gates * torch.sigmoid(gates * clamp.alpha))
    return (silu(gates) if activation == "silu" else gelu(gates, approximate="tanh")) * values
