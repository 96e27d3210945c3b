"""Attention over the paged KV cache in plain torch, from the same arrays as the kernel."""

import torch
from torch import Tensor

from streamserve.execution.cuda.attention import AttentionWork


def attend(
    q: Tensor,
    cache_layer: Tensor,
    work: AttentionWork,
    tables: Tensor,
    limits: Tensor,
    out: Tensor,
    workspace: Tensor,
    scale: float,
    tiles: tuple[bool, ...],
    combined: bool,
    softcap: float = 0.0,
) -> None:
    """Attend `q` [rows, heads, dim] to the visible slots of `cache_layer` [blocks, k|v, kv head, slot, dim]
    and write `out` [rows, heads, dim]. `scale` multiplies the scores, `softcap` bounds them (0: does not).
    `tiles` and `combined`: which tile sizes occur, and whether any row has partial results."""
    block_size, dim = cache_layer.shape[3:]
    kv_heads, heads = cache_layer.shape[2], q.shape[1]
    count = int(work.starts[-1])
    seen: set[tuple[int, int]] = set()
    for sequence, row, rows, *_ in work.items[:count].tolist():
        if (sequence, row) in seen:
            continue
        seen.add((sequence, row))
        part = slice(row, row + rows)
        ends = [item[4] for item in work.items[:count].tolist() if item[0] == sequence and item[1] == row]
        slots = torch.arange(max(ends), device=q.device)
        blocks = cache_layer[tables[sequence, : -(-len(slots) // block_size)].long()]
        keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, : len(slots)].float()
        mask = _visible(slots, limits[part], work.firsts[part], work.bits[part])
        queries = q[part].float().view(rows, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("rhgd,hsd->rhgs", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        attended = torch.einsum("rhgs,hsd->rhgd", scores.softmax(-1), values)
        out[part] = attended.reshape(rows, heads, dim).to(out.dtype)


def _visible(slots: Tensor, limits: Tensor, firsts: Tensor, bits: Tensor) -> Tensor:
    """Return which slots each row sees: bool [rows, slots]."""
    seen = (slots < limits[:, None]) & (slots >= firsts[:, None])
    words = bits.shape[1]
    if words:
        nodes = slots - limits[:, None] + 1
        word = bits.gather(1, (nodes // 32).clamp(0, words - 1).long())
        bit = (word >> (nodes % 32)) & 1
        seen |= (nodes > 0) & (nodes < 32 * words) & bit.bool()
    return seen
