"""Attention over the paged KV cache in plain torch, with the same arguments as the kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamserve.execution.backends.cuda.attention import TILES, AttentionWork
from streamserve.execution.compute.kv_vectors import dequantize_vectors

ALL_TILES = (True,) * len(TILES)


def attend(
    q: Tensor,
    cache_layer: Tensor,
    work: AttentionWork[Tensor],
    tables: Tensor,
    limits: Tensor,
    out: Tensor,
    scale: float,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    *,
    workspace: Tensor,
    tiles: Sequence[bool] = ALL_TILES,
    combined: bool = True,
) -> None:
    """Write the attention of `q` over the slots of `cache_layer` that each row sees to `out`. Rows without an
    item are not written.

    Of the items, only the sequence and the rows are used: the slots that a row sees follow from `limits` and
    the work's `firsts` and `bits`.

    Args:
        q: [rows, heads, dim]; rows need not be contiguous with each other.
        cache_layer: [blocks, k|v, kv heads, block size, vector], in any dtype that converts to float32; a
            vector longer than dim includes its scale (execution/compute/kv_vectors.py).
        work: The work of the layer's window (cuda.attention.AttentionWork).
        tables, limits: The step's block tables and limits (cuda.attention.AttentionArrays).
        out: [rows, heads, dim].
        scale: Factor of the scores.
        softcap: Bound of the scores, as softcap · tanh(score / softcap); 0: none.
        k_scale: Factor of the cached keys, if their dtype is narrower than the model's.
        v_scale: Factor of the cached values.
        sinks: [heads] (float32): scores that take part in the softmax without a value.
        workspace, tiles, combined: Not used here.
    """
    count = int(work.starts[-1])
    seen = set()
    for sequence, row, rows in work.items[:count, :3].tolist():
        if (sequence, row) in seen:  # an item for another range of these rows' slots
            continue
        seen.add((sequence, row))
        part = slice(row, row + rows)
        begin, mask = _visible(limits[part], work.firsts[part], work.bits[part], cache_layer, tables)
        keys, values = _gather(cache_layer, tables[sequence], begin, mask, q.shape[2])
        keys, values = keys * k_scale, values * v_scale
        attended = _attend_tile(q[part].float(), keys, values, mask, scale, softcap, sinks)
        out[part] = attended.to(out.dtype)


def _visible(
    limits: Tensor, firsts: Tensor, bits: Tensor, cache_layer: Tensor, tables: Tensor
) -> tuple[int, Tensor]:
    """Return the mask of the slots that each row sees, bool [rows, slots], after the number of its first
    slot."""
    block_size, words = cache_layer.shape[3], bits.shape[1]
    begin = int(firsts.min()) // block_size * block_size
    end = min(int(limits.max()) + 32 * words, tables.shape[1] * block_size)
    slots = torch.arange(begin, max(end, begin + 1), device=limits.device)
    seen = (slots < limits[:, None]) & (slots >= firsts[:, None])
    if words:
        nodes = slots - limits[:, None] + 1
        word = bits.gather(1, (nodes // 32).clamp(0, words - 1))
        seen |= (nodes > 0) & (nodes < 32 * words) & ((word >> (nodes % 32)) & 1).bool()
    return begin, seen


def _gather(cache_layer: Tensor, table: Tensor, begin: int, mask: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [kv heads, slots, dim] of the mask's slots in float32. Slots that no row sees
    are zero: they may contain NaN, and a weight of 0 times NaN is NaN."""
    kv_heads, block_size, width = cache_layer.shape[2:]
    slots = mask.shape[1]
    first = begin // block_size
    blocks = table[first : first - (-slots // block_size)].long()
    vectors = cache_layer[blocks]
    floats = vectors.float() if width == dim else dequantize_vectors(vectors, torch.float32)
    gathered = floats.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :slots]
    keys, values = gathered.masked_fill(~mask.any(0)[:, None], 0.0)
    return keys, values


def _attend_tile(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of `q` [rows, heads, dim] over `keys` and `values`, in float32."""
    rows, heads, dim = q.shape
    grouped = q.view(rows, len(keys), -1, dim)
    scores = torch.einsum("rhgd,hsd->hgrs", grouped, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        further = sinks.view(len(keys), -1, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat([scores, further], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("hgrs,hsd->rhgd", weights, values).reshape(rows, heads, dim)
