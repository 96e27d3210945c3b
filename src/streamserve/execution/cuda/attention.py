"""Plan attention on a device: pieces of work of even size, for one kernel that serves prefill, decode and
token trees.

An item is a tile of query tokens of one sequence, and a range of the keys that they see. Where a step has too
few tiles to occupy the device, as in decoding, the keys are divided among several items, whose partial
results are combined afterwards.

    sequence 7, 3 query tokens, 900 keys     item (7, rows 12-14, keys 0-512)    -> partials 0-2  ┐ combined
                                             item (7, rows 12-14, keys 512-900)  -> partials 3-5  ┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.attention import visible
from streamserve.execution.layout import Ints, Layout, SpanRows

Int32s = NDArray[np.int32]

TILES = (16, 64, 128)
"""Rows of a tile: query tokens times the query heads that share a key-value head."""

KEY_STEP = 128
"""Keys are divided at multiples of this."""

ITEMS_PER_MULTIPROCESSOR = 4
"""Items times key-value heads that a step should have for each multiprocessor, if it has enough keys."""

DIRECT = -1
"""In place of an item's first partial result: its result is complete and goes to the output."""


class AttentionWork(NamedTuple):
    """The work of all layers with one window, as arrays on the host or tensors on the device (int32).

    * `starts` [4]: the items of tile size TILES[i] are number `starts[i]` up to `starts[i + 1]`.
    * `firsts` [rows]: the first slot that a row sees.
    * `bits` [rows, words]: bit n of a row: it sees tree node n, in slot `limits[row] - 1 + n`.
    * `combine` [rows, 3]: first partial result of a row, distance between its partial results, their number;
      0 of them where the output is complete.
    * `items` [items, 8]: sequence, first row, rows, first key, end of the keys, first partial result or
      DIRECT, and two unused.
    """

    starts: Any
    firsts: Any
    bits: Any
    combine: Any
    items: Any


@dataclass(frozen=True)
class AttentionArrays:
    """A step's work: the block `tables` [sequences, width], `limits` [rows]: how many leading slots of its
    sequence a row sees whatever the tree, and the work of each distinct window."""

    tables: Int32s
    limits: Int32s
    works: Mapping[int | None, AttentionWork]


def tile_of(rows: int) -> int:
    """Return the index of the smallest tile size for `rows` rows, or the largest."""
    return next((index for index, size in enumerate(TILES) if rows <= size), len(TILES) - 1)


def padded_group(group: int) -> int:
    """Return the rows of a tile that a query token takes: `group` rounded up to a power of two."""
    return 1 << (group - 1).bit_length()


def plan_attention(
    layout: Layout,
    block_size: int,
    group: int,
    kv_heads: int,
    windows: Sequence[int | None],
    multiprocessors: int,
    max_partials: int,
) -> AttentionArrays:
    """Plan the attention of `layout`. `group`: query heads that share one of the `kv_heads`. At most
    `max_partials` partial results (of a query token each) are planned."""
    spans = _Spans.of(layout)
    words = _words(layout)
    limits = _limits(layout, spans)
    works = {}
    for window in windows:
        firsts = _firsts(layout, window)
        items, starts, combine = _items(
            spans, firsts, padded_group(group), kv_heads, multiprocessors, max_partials
        )
        bits = _bits(layout, window, words)
        works[window] = AttentionWork(starts, firsts, bits, combine, items)
    return AttentionArrays(_tables(layout, spans, block_size), limits, works)


@dataclass(frozen=True)
class _Spans:
    """Of each span: its first row, number of rows, and end of its slots."""

    rows: Ints
    counts: Ints
    ends: Ints

    @classmethod
    def of(cls, layout: Layout) -> "_Spans":
        rows = np.fromiter((part.offset for part in layout.parts), np.int64, len(layout.parts))
        counts = np.diff(np.append(rows, len(layout.tokens)))
        ends = np.fromiter(
            (part.span.start + part.span.query_tokens for part in layout.parts), np.int64, len(layout.parts)
        )
        return cls(rows, counts, ends)


def _tables(layout: Layout, spans: _Spans, block_size: int) -> Int32s:
    used = -(-spans.ends // block_size)
    table = np.zeros((len(used), int(used.max())), np.int32)
    blocks = chain.from_iterable(
        part.span.blocks[:count] for part, count in zip(layout.parts, used.tolist(), strict=True)
    )
    table[np.arange(table.shape[1]) < used[:, None]] = np.fromiter(blocks, np.int32, int(used.sum()))
    return table


def _limits(layout: Layout, spans: _Spans) -> Int32s:
    """A committed token sees all slots up to its own, a tree node those up to the root."""
    ends = np.repeat(spans.ends, spans.counts)
    last_rows = np.repeat(spans.rows + spans.counts, spans.counts)
    limits = (ends - last_rows + np.arange(len(ends)) + 1).astype(np.int32)
    for part in _with_trees(layout):
        after_root = max(part.root + 1, part.offset)
        limits[after_root : part.offset + part.span.query_tokens - part.span.skip] = part.span.start + len(
            part.span.tokens
        )
    return limits


def _with_trees(layout: Layout) -> list[SpanRows]:
    return [part for part in layout.parts if part.span.tree is not None and len(part.span.tree.tokens) > 1]


def _firsts(layout: Layout, window: int | None) -> Int32s:
    if window is None:
        return np.zeros(len(layout.positions), np.int32)
    return np.maximum(layout.positions - window + 1, 0).astype(np.int32)


def _words(layout: Layout) -> int:
    sizes = [len(part.span.tree.tokens) for part in _with_trees(layout) if part.span.tree]
    return -(-max(sizes) // 32) if sizes else 0


def _bits(layout: Layout, window: int | None, words: int) -> Int32s:
    if not words:
        return np.zeros((len(layout.tokens), 0), np.int32)
    bits = np.zeros((len(layout.tokens), words * 32), np.uint8)
    for part in _with_trees(layout):
        span = part.span
        root = span.start + len(span.tokens) - 1
        first = max(root, span.start + span.skip)
        slots = np.arange(root, span.start + span.query_tokens)
        seen = visible(part, slots[first - root :], slots, window)
        row = part.offset + first - span.start - span.skip
        bits[row : row + len(seen), : seen.shape[1]] = seen
        if first == root:
            bits[row] = 0  # the root is a committed token
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _items(
    spans: _Spans, firsts: Int32s, group: int, kv_heads: int, multiprocessors: int, max_partials: int
) -> tuple[Int32s, Int32s, Int32s]:
    """Return items, starts and combine (AttentionWork)."""
    tiles = np.searchsorted(TILES[:-1], spans.counts * group)
    tokens = np.maximum(np.asarray(TILES)[tiles] // group, 1)
    per_span = -(-spans.counts // tokens)
    span = np.repeat(np.arange(len(per_span)), per_span)
    within = np.arange(len(span)) - np.repeat(np.cumsum(per_span) - per_span, per_span)
    row = spans.rows[span] + within * tokens[span]
    rows = np.minimum(tokens[span], spans.rows[span] + spans.counts[span] - row)
    # A row sees no slot after its own, a tree node included: its ancestors are before it.
    end = spans.ends[span] - (spans.rows[span] + spans.counts[span] - row - rows)
    begin = firsts[row] // KEY_STEP * KEY_STEP
    parts = _parts(end - begin, rows, tiles[span], kv_heads, multiprocessors, max_partials)
    size = -(-(end - begin) // (parts * KEY_STEP)) * KEY_STEP
    parts = np.maximum(-(-(end - begin) // size), 1)
    # Partial results of a tile: part after part, in each the tile's rows.
    split = parts > 1
    partials = np.where(split, rows * parts, 0)
    first_partial = np.where(split, np.cumsum(partials) - partials, DIRECT)
    combine = np.zeros((int(spans.counts.sum()), 3), np.int32)
    tile = np.repeat(np.arange(len(rows)), rows)
    offset = np.arange(len(tile)) - np.repeat(np.cumsum(rows) - rows, rows)
    combine[:, 0] = np.where(split[tile], first_partial[tile] + offset, 0)
    combine[:, 1] = np.where(split[tile], rows[tile], 0)
    combine[:, 2] = np.where(split[tile], parts[tile], 0)
    items = np.repeat(np.arange(len(rows)), parts)
    part = np.arange(len(items)) - np.repeat(np.cumsum(parts) - parts, parts)
    array = np.zeros((len(items), 8), np.int32)
    array[:, 0], array[:, 1], array[:, 2] = span[items], row[items], rows[items]
    array[:, 3] = begin[items] + part * size[items]
    array[:, 4] = np.minimum(array[:, 3] + size[items], end[items])
    array[:, 5] = np.where(split[items], first_partial[items] + part * rows[items], DIRECT)
    order = np.argsort(tiles[span[items]], kind="stable")
    starts = np.searchsorted(tiles[span[items]][order], np.arange(len(TILES) + 1)).astype(np.int32)
    return array[order], starts, combine


def _parts(
    keys: Ints, rows: Ints, tiles: Ints, kv_heads: int, multiprocessors: int, max_partials: int
) -> Ints:
    """Return into how many parts each tile's keys are divided: none for the largest tiles, of which a chunk
    has many."""
    enough = ITEMS_PER_MULTIPROCESSOR * multiprocessors
    size = max(KEY_STEP, int(keys.sum()) * kv_heads // enough)
    if len(keys) * kv_heads >= enough:
        size = max(size, 2 * int(keys.mean()))
    size = -(-size // KEY_STEP) * KEY_STEP
    parts = np.where(tiles < len(TILES) - 1, -(-keys // size), 1)
    while int((rows * parts)[parts > 1].sum()) > max_partials:
        parts = np.maximum(parts // 2, 1)
    return np.maximum(parts, 1)
