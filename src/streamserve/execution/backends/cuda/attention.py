"""Plan attention on a device: items of work of even size, for one kernel that serves prefill, decode and
token trees.

An item is a tile of query tokens of one sequence and a range of its slots. Where a step has too few tiles to
occupy the device, as in decoding, the slots are divided among several items (split keys). Their partial
results are combined afterwards.

    sequence 7, 3 query tokens, 900 slots     item (7, rows 12-14, slots 0-512)    -> partials 0-2  ┐ combined
                                              item (7, rows 12-14, slots 512-900)  -> partials 3-5  ┘
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.model.layout import Ints, Layout, SpanRows

Int32s = NDArray[np.int32]

TILES = (16, 64, 128)
"""Sizes of a tile: query tokens times the padded number of query heads that share a key-value head."""

KEY_STEP = 64
"""Slots are divided at multiples of KEY_STEP."""

MIN_SPLIT = (128, 256, 512)
"""The smallest number of slots of a split item, by tile size. Larger tiles write larger partial results, so
their items must be longer."""

ITEMS_PER_MULTIPROCESSOR = (4, 4, 2)
"""Number of items, times key-value heads, that splitting aims at for each multiprocessor, by tile size."""

MAX_GROWTH = 1.25
"""Upper bound of the items after splitting, relative to the items before, in a step that has enough of them
already: only sequences that are much longer than the others are divided."""

ITEM_FIELDS = 8

DIRECT = -1
"""The first partial result of an item whose result is complete: it is written to the output."""

Array = TypeVar("Array")


class AttentionWork(NamedTuple, Generic[Array]):
    """The work of all layers with one window: int32 arrays on the host, or tensors on the device.

    * `starts` [4]: the items of tile size TILES[i] are number `starts[i]` up to `starts[i + 1]`.
    * `firsts` [rows]: the first slot of its sequence that the window lets a row see.
    * `bits` [rows, words]: bit n % 32 of word n // 32 is set if the row sees tree node n > 0, whose slot is
      `limits[row] - 1 + n`. `words` is 0 in a step without trees.
    * `combine` [rows, 3]: a row's first partial result, the distance between its partial results, and their
      number, which is 0 where items write the output.
    * `items` [items, 8]: sequence, first row, number of rows, first slot, end of the slots, first partial
      result or DIRECT, 0, 0. Within a tile size, items with more slots come first.
    """

    starts: Array
    firsts: Array
    bits: Array
    combine: Array
    items: Array


@dataclass(frozen=True)
class AttentionArrays:
    """A step's work. `tables` [sequences, width]: block tables. `limits` [rows]: the number of leading slots
    of its sequence that a row sees, tree nodes aside. `works`: the work of each distinct window."""

    tables: Int32s
    limits: Int32s
    works: Mapping[int | None, AttentionWork[Int32s]]


def padded_group(group: int) -> int:
    """Return the part of a tile that a query token takes: `group` rounded up to a power of two.

    Raises ValueError for a group that does not fit in the largest tile.
    """
    padded = 1 << (group - 1).bit_length()
    if padded > TILES[-1]:
        raise ValueError(f"{group} query heads share a key-value head: at most {TILES[-1]} are supported")
    return padded


def workspace_size(max_partials: int, heads: int, dim: int) -> int:
    """Return the size in float32 of a workspace for `max_partials` partial results of `heads` query heads:
    [max_partials, heads, dim] weighted sums, then [max_partials, heads, 2] maxima and sums of weights."""
    return max_partials * heads * (dim + 2)


def plan_attention(
    layout: Layout,
    block_size: int,
    group: int,
    kv_heads: int,
    windows: Sequence[int | None],
    multiprocessors: int,
    max_partials: int,
) -> AttentionArrays:
    """Plan the attention of the rows of `layout`.

    Args:
        block_size: Slots of a KV block.
        group: Number of query heads that share one of the `kv_heads` key-value heads.
        windows: The attention window of each layer; layers with equal windows share one plan.
        multiprocessors: Number of multiprocessors of the device.
        max_partials: Capacity of the workspace, in partial results of one query token and all heads. The plan
            splits fewer items if their partial results would not fit.

    Raises ValueError for a group that is too large.
    """
    spans = _Spans.of(layout)
    nodes = _TreeNodes.of(layout)
    limits = spans.limits(len(layout.tokens))
    limits[nodes.rows] = nodes.roots + 1
    tiles = _Tiles.of(spans, padded_group(group))
    target = _Target(kv_heads, multiprocessors, max_partials)
    works: dict[int | None, AttentionWork[Int32s]] = {}
    longest = int(layout.positions.max())
    for window in dict.fromkeys(windows):
        effective = None if window is not None and window > longest else window
        if effective not in works:
            works[effective] = _plan_window(layout, tiles, nodes, effective, target)
        works[window] = works[effective]
    tables = block_tables(layout, spans.ends, block_size) if layout.tables is None else layout.tables
    return AttentionArrays(tables, limits, works)


@dataclass(frozen=True)
class _Target:
    """The device that work is planned for: see plan_attention."""

    kv_heads: int
    multiprocessors: int
    max_partials: int

    def items(self, tile: int) -> int:
        """Return the number of items of tile size TILES[tile] that occupy the device."""
        return max(1, ITEMS_PER_MULTIPROCESSOR[tile] * self.multiprocessors // self.kv_heads)


@dataclass(frozen=True)
class _Spans:
    """First row, number of rows, and end of the slots of each span."""

    offsets: Ints
    counts: Ints
    ends: Ints

    @classmethod
    def of(cls, layout: Layout) -> "_Spans":
        offsets = layout.offsets
        if layout.tables is not None:
            return cls(offsets, np.ones_like(offsets), layout.positions + 1)
        counts = np.empty_like(offsets)
        np.subtract(offsets[1:], offsets[:-1], out=counts[:-1])
        counts[-1] = len(layout.tokens) - offsets[-1]
        starts = [span.start + span.skip for span in layout.spans]
        return cls(offsets, counts, np.array(starts, np.int64) + counts)

    def limits(self, rows: int) -> Int32s:
        """Return, for each row, the end of the slots up to the row's own slot, [rows]."""
        first = self.ends - self.counts + 1
        limits: Int32s = (np.repeat(first - self.offsets, self.counts) + np.arange(rows)).astype(np.int32)
        return limits


@dataclass(frozen=True)
class _TreeNodes:
    """All tree nodes of the step except the roots, and their paths to the roots.

    * `words`: words of 32 bits that have a bit for each node of the largest tree.
    * `height`: the largest depth of a node.
    * `nodes`, `rows`, `roots`: for each node with a row, its index among all nodes (roots included), its row,
      and the slot of its root.
    * `numbers`, `parents`: for each of all nodes, its number in its tree and the index of its parent.
    """

    words: int
    height: int
    nodes: Ints
    rows: Ints
    roots: Ints
    numbers: Ints
    parents: Ints

    @classmethod
    def of(cls, layout: Layout) -> "_TreeNodes":
        parts = [] if layout.tables is not None else _with_draft_tokens(layout)
        none = np.zeros(0, np.int64)
        if not parts:
            return cls(0, 0, none, none, none, none, none)
        spans = [part.span for part in parts]
        parents = [span.tree.parents for span in spans if span.tree is not None]
        sizes = np.array([len(tree) for tree in parents], np.int64)
        committed = np.array([len(span.tokens) for span in spans], np.int64)
        roots = np.array([span.start for span in spans], np.int64) + committed - 1
        offsets = np.array([part.offset for part in parts], np.int64)
        root_rows = offsets + committed - 1 - np.array([span.skip for span in spans], np.int64)
        numbers = _within(sizes)
        tree = np.repeat(np.arange(len(sizes)), sizes)
        above = np.fromiter(chain.from_iterable(parents), np.int64, len(tree))
        above += np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = root_rows[tree] + numbers
        nodes = np.flatnonzero((numbers > 0) & (rows >= offsets[tree]))
        slots = roots[tree[nodes]]
        height = int((layout.positions[rows[nodes]] - slots).max())
        return cls(-(-int(sizes.max()) // 32), height, nodes, rows[nodes], slots, numbers, above)

    def bits(self, window: int | None, rows: int) -> Int32s:
        """Return the bits [rows, words] of the ancestors within `window` tokens of each row's node, the node
        itself included."""
        bits = np.zeros((rows, self.words), np.uint32)
        at, ancestors = self.rows, self.nodes
        for _ in range(self.height if window is None else min(window, self.height)):
            numbers = self.numbers[ancestors]
            bits[at, numbers >> 5] |= (1 << (numbers & 31)).astype(np.uint32)
            ancestors = self.parents[ancestors]
            below_root = self.numbers[ancestors] > 0
            at, ancestors = at[below_root], ancestors[below_root]
        return bits.view(np.int32)


def _with_draft_tokens(layout: Layout) -> list[SpanRows]:
    return [part for part in layout.parts if part.span.tree is not None and len(part.span.tree.tokens) > 1]


def block_tables(layout: Layout, ends: Ints, block_size: int) -> Int32s:
    """Return the block tables [sequences, width] of spans whose slots end at `ends`, filled up with 0."""
    used = -(-ends // block_size)
    blocks: list[int] = []
    for span, count in zip(layout.spans, used.tolist(), strict=True):
        blocks += span.blocks[:count]
    tables = np.zeros((len(used), int(used.max())), np.int32)
    # struct.pack converts a list in half of the time of np.array and np.fromiter.
    packed = np.frombuffer(struct.pack(f"{len(blocks)}i", *blocks), np.int32)
    tables[np.arange(tables.shape[1]) < used[:, None]] = packed
    return tables


def _plan_window(
    layout: Layout, tiles: "_Tiles", nodes: _TreeNodes, window: int | None, target: _Target
) -> AttentionWork[Int32s]:
    rows = len(layout.tokens)
    firsts = np.zeros(rows, np.int32)
    if window is not None:
        np.maximum(layout.positions - (window - 1), 0, out=firsts, casting="unsafe")
    begins = np.minimum.reduceat(firsts, tiles.rows)
    parts, sizes = _split(tiles, begins, target)
    starts, items, combine = _items(tiles, begins, parts, sizes)
    return AttentionWork(starts, firsts, nodes.bits(window, rows), combine, items)


@dataclass(frozen=True)
class _Tiles:
    """Size (an index of TILES), sequence, first row, number of rows, and end of the visible slots of each
    tile of query tokens."""

    sizes: Ints
    sequences: Ints
    rows: Ints
    counts: Ints
    ends: Ints

    @classmethod
    def of(cls, spans: _Spans, group: int) -> "_Tiles":
        """Cut each span into tiles of the smallest size that holds all its rows, or the largest size."""
        sizes = np.searchsorted(TILES[:-1], spans.counts * group)
        tokens = np.asarray(TILES)[sizes] // group
        tiles = -(-spans.counts // tokens)
        sequences = np.repeat(np.arange(len(tiles)), tiles)
        within = _within(tiles) * tokens[sequences]
        rows = spans.offsets[sequences] + within
        counts = np.minimum(tokens[sequences], spans.counts[sequences] - within)
        # No row sees a slot after its own: a tree node's ancestors come before it.
        ends = (spans.ends - spans.counts)[sequences] + within + counts
        return cls(sizes[sequences], sequences, rows, counts, ends)


def _within(counts: Ints) -> Ints:
    """Return the numbers 0 to count - 1 for each count, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)


def _split(tiles: _Tiles, begins: Ints, target: _Target) -> tuple[Ints, Ints]:
    """Return, for each tile, the number of parts that its slots are divided into, and the slots of a part."""
    keys = tiles.ends - begins // KEY_STEP * KEY_STEP
    sizes = np.empty_like(keys)
    for tile, smallest in enumerate(MIN_SPLIT):
        chosen = np.flatnonzero(tiles.sizes == tile)
        if len(chosen):
            sizes[chosen] = _part_size(keys[chosen], smallest, target.items(tile))
    parts = -(-keys // sizes)
    while int(np.dot(tiles.counts * (parts > 1), parts)) > target.max_partials:
        sizes *= 2
        parts = -(-keys // sizes)
    even = -(-keys // parts)
    sizes = -(-even // KEY_STEP) * KEY_STEP
    return -(-keys // sizes), sizes


def _part_size(keys: Ints, smallest: int, items: int) -> int:
    """Return the size in slots of parts of tiles with `keys` slots each: the smallest one found that makes at
    most `items` parts, or MAX_GROWTH times the number of tiles if that is more."""
    longest = int(keys.max())
    allowed = max(items, int(len(keys) * MAX_GROWTH))
    size = max(smallest, int(keys.sum()) // items // KEY_STEP * KEY_STEP)
    while size < longest and int((-(-keys // size)).sum()) > allowed:
        size = -(-size * 5 // 4 // KEY_STEP) * KEY_STEP
    return size


def _items(tiles: _Tiles, begins: Ints, parts: Ints, sizes: Ints) -> tuple[Int32s, Int32s, Int32s]:
    """Return starts, items and combine (see AttentionWork)."""
    first_partials, combine = _partials(tiles.counts, parts)
    first_slots = begins // KEY_STEP * KEY_STEP
    if len(first_partials):
        tile, part = np.repeat(np.arange(len(parts)), parts), _within(parts)
        cuts = first_slots[tile] + part * sizes[tile]
        firsts = np.where(parts[tile] > 1, first_partials[tile] + part * tiles.counts[tile], DIRECT)
    else:
        tile, cuts, firsts = np.arange(len(parts)), first_slots, np.full(len(parts), DIRECT)
    begins = np.maximum(cuts, begins[tile])
    ends = np.minimum(cuts + sizes[tile], tiles.ends[tile])
    tile_sizes = tiles.sizes[tile]
    order = np.argsort((tile_sizes << 32) - (ends - begins), kind="stable")
    items = np.zeros((ITEM_FIELDS, len(tile)), np.int32)
    items[:6] = tiles.sequences[tile], tiles.rows[tile], tiles.counts[tile], begins, ends, firsts
    starts = np.zeros(len(TILES) + 1, np.int32)
    np.cumsum(np.bincount(tile_sizes, minlength=len(TILES)), out=starts[1:])
    return starts, np.ascontiguousarray(items.T[order]), combine


def _partials(counts: Ints, parts: Ints) -> tuple[Ints, Int32s]:
    """Return the first partial result of each tile of `counts` rows (an empty array if no tile has several
    parts), and `combine` (see AttentionWork). The partial results of a tile are ordered by part, then by
    row."""
    combine = np.zeros((int(counts.sum()), 3), np.int32)
    if int(parts.max()) == 1:
        return np.zeros(0, np.int64), combine
    partials = np.where(parts > 1, counts * parts, 0)
    first_partials = np.cumsum(partials) - partials
    rows = np.flatnonzero(np.repeat(parts > 1, counts))
    tile = np.repeat(np.arange(len(counts)), counts)[rows]
    combine[rows, 0] = first_partials[tile] + _within(counts)[rows]
    combine[rows, 1] = counts[tile]
    combine[rows, 2] = parts[tile]
    return first_partials, combine
