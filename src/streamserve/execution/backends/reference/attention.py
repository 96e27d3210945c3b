"""Attention over the paged KV cache in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.attention import PLAIN, Scoring
from streamserve.execution.model.layout import Ints, Layout, SpanRows, ancestors

QUERY_TILE = 128
"""Maximum query tokens of one sequence that attend together: bounds the mask of a long chunk."""


@dataclass(frozen=True)
class _Tile:
    """Some query rows of a sequence, the slots that they attend to, and the additive mask [rows × query heads
    of a group, slots] (0 or -inf; None if all rows see all slots)."""

    rows: slice
    slots: slice
    mask: Tensor | None


@dataclass(frozen=True)
class _SequencePlan:
    """The blocks to gather for one sequence, and the tiles of queries over them."""

    blocks: Tensor
    tiles: list[_Tile]


class ReferenceAttention:
    """Attention in plain torch, one sequence at a time, so that a sequence's result does not depend on the
    other requests in its batch."""

    row_invariant = False

    def __init__(
        self, cache: KVCache, windows: Sequence[int | None], group: int, scoring: Scoring = PLAIN
    ) -> None:
        """`windows`: the window of each layer. `group`: the number of query heads for each key-value head."""
        self._cache = cache
        self._scoring = scoring
        self._windows = tuple(windows)
        self._group = group
        self._written = torch.empty(0)
        self._plans: dict[int | None, list[_SequencePlan]] = {}

    def plan(self, layout: Layout) -> None:
        self._written = self._cache.write_index(layout.slots)
        self._plans = {
            window: [self._plan_sequence(part, window) for part in layout.parts]
            for window in set(self._windows)
        }

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        self._cache.write(layer, self._written, k, v)
        out = torch.empty_like(q)
        for plan in self._plans[self._windows[layer]]:
            keys, values = self._cache.read(layer, plan.blocks)
            for tile in plan.tiles:
                seen = keys[:, tile.slots], values[:, tile.slots]
                out[tile.rows] = attend(q[tile.rows], *seen, tile.mask, self._scoring, sinks)
        return out

    def _plan_sequence(self, part: SpanRows, window: int | None) -> _SequencePlan:
        span, block_size = part.span, self._cache.block_size
        first = _first_visible(part.positions[span.start + span.skip :], window) // block_size
        blocks = span.blocks[first : -(-(span.start + span.query_tokens) // block_size)]
        tiles = [
            self._plan_tile(
                part, window, begin, min(begin + QUERY_TILE, span.query_tokens), first * block_size
            )
            for begin in range(span.skip, span.query_tokens, QUERY_TILE)
        ]
        return _SequencePlan(self._cache.read_index(blocks), tiles)

    def _plan_tile(self, part: SpanRows, window: int | None, begin: int, end: int, gathered: int) -> _Tile:
        """Return the tile of query rows `begin` to `end` of the span, over slots gathered from position
        `gathered` on."""
        start = part.span.start
        queries = np.arange(start + begin, start + end)
        keys = np.arange(_first_visible(part.positions[queries], window), start + end)
        seen = visible(part, queries, keys, window)
        mask = None
        if not seen.all():
            mask = torch.zeros(seen.shape, dtype=self._cache.dtype)
            mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
            mask = mask.repeat_interleave(self._group, dim=0)
        offset = part.offset - part.span.skip
        rows = slice(offset + begin, offset + end)
        return _Tile(rows, slice(int(keys[0]) - gathered, start + end - gathered), mask)


def _first_visible(positions: Ints, window: int | None) -> int:
    return 0 if window is None else max(0, int(positions.min()) - window + 1)


def visible(part: SpanRows, queries: Ints, keys: Ints, window: int | None) -> NDArray[np.bool_]:
    """Return the visibility of keys for queries, bool [query, key]. Both are given as indices of the
    sequence's slots."""
    seen = keys[None] <= queries[:, None]
    if part.span.tree:
        root = part.span.start + len(part.span.tokens) - 1
        nodes, others = queries > root, keys > root
        tree = ancestors(part.span.tree)
        seen[np.ix_(nodes, others)] = tree[np.ix_(queries[nodes] - root, keys[others] - root)]
    if window is not None:
        seen &= part.positions[keys][None] > part.positions[queries][:, None] - window
    return seen


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the softmax attention of `q` [rows, head, dim] over `keys`, `values` [kv head, slots, dim], with
    `sinks` [head] as further scores.

    Query heads that share a key-value head are stacked as its rows, so that keys are read once.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[0]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    if scoring.cap or sinks is not None:
        if sinks is not None:
            sinks = sinks.view(1, kv_heads, 1, -1).repeat(1, 1, rows, 1).view(1, kv_heads, -1, 1)
        out = _attend_in_parts(grouped, keys[None], values[None], mask, scoring, sinks)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys[None], values[None], attn_mask=mask, scale=scoring.scale
        )
    return out.view(kv_heads, rows, heads // kv_heads, dim).transpose(0, 1).reshape(rows, heads, dim)


def _attend_in_parts(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """Return attention with bounded scores and `sinks` [1, kv head, its rows, 1], computed in float32:
    torch's scaled_dot_product_attention supports neither."""
    scale = scoring.scale or q.shape[-1] ** -0.5
    products, cap = q.float() @ keys.float().mT, scoring.cap
    scores = cap * torch.tanh(products * (scale / cap)) if cap else products * scale
    scores = scores if mask is None else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(q.dtype)
