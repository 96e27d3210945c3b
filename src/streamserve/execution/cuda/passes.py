"""The shapes that passes on a device are padded to, and where the arrays of a pass lie in the buffer that is
uploaded for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.cuda.attention import TILES, AttentionArrays, AttentionWork
from streamserve.execution.cuda.buffers import Arrays, Field, Fields
from streamserve.execution.cuda.draws import DRAW_WORDS
from streamserve.execution.cuda.graphs import CAPTURED_ROWS, ROWS, bucket
from streamserve.execution.layout import Layout

Int32s = NDArray[np.int32]

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Tokens of the longest path of a step's trees, root included, that steps are padded to."""

MAX_WORDS = 4
"""Words of the tree masks that captured passes have at most: trees of up to 128 nodes."""

RESULTS = ROWS[-1] * (1 + 2 * DEPTHS[-1])
"""Numbers that the results of a sampling pass have memory for."""

MAX_PASSES = 32
"""The most passes of a loop that drafts chains of one token more."""

PLACES = (MAX_PASSES + 1) * 2 * ROWS[-1]
"""Numbers that a drafter leaves after the results: draft tokens, by place. A token -1 - p of a pass is the
one that is at place p when the pass runs."""

MAX_ITEMS = 4096
"""Pieces of attention's work in a step, in addition to one for each row."""


Tiles = tuple[bool, ...]

SMALLEST_TILE: Tiles = (True,) + (False,) * (len(TILES) - 1)
ALL_TILES: Tiles = (True,) * len(TILES)


@dataclass(frozen=True)
class ForwardShape:
    """What a forward pass is for. `words`: of the tree masks; `tiles`: which tile sizes of attention may
    occur; `combined`: whether any row's keys may be split."""

    rows: int
    words: int
    tiles: Tiles
    combined: bool

    @property
    def captured(self) -> bool:
        """Whether it is worth a graph."""
        return self.rows <= CAPTURED_ROWS


@dataclass(frozen=True)
class SampleShape:
    """What a captured sampling pass is for: `nodes` rows of logits, of trees with paths of up to `depth`
    tokens. `scored`: single tokens, with the probability of the likeliest one."""

    nodes: int
    depth: int
    scored: bool = False

    @property
    def results(self) -> int:
        """Numbers that the pass returns: tokens, or lengths, tokens and paths."""
        return self.nodes * (1 + self.scored if self.depth == 1 else 1 + 2 * self.depth)


@dataclass(frozen=True)
class Nodes:
    """The tree nodes to sample at, tree by tree (int32). Those of the first `trees` trees are walked on the
    device; the logits of the others are read by the host.

    `rows` [nodes] of the hidden states, `draws` [nodes, words] (cuda/draws.py), the draft `tokens` (negative:
    given by their place), their `parents` and the `slots` of their KV [nodes], `firsts` [trees + 1] where
    each walked tree starts and the last one ends; `depth`: tokens of the longest path, root included.
    """

    rows: Int32s
    tokens: Int32s
    parents: Int32s
    slots: Int32s
    firsts: Int32s
    draws: Int32s
    depth: int

    @property
    def shape(self) -> SampleShape:
        """The padded shape. Raises ValueError for trees that are too deep."""
        depth = bucket(self.depth, DEPTHS)
        if depth is None:
            raise ValueError(f"a token tree has {self.depth} levels; at most {DEPTHS[-1]} are verified")
        return SampleShape(bucket(len(self.rows)) or len(self.rows), depth)


@dataclass(frozen=True)
class PreparedPass:
    """A forward pass of so many `rows`: its shape, its arrays, and the block `tables` of its spans, which are
    in flight to the device."""

    shape: ForwardShape
    arrays: Arrays
    tables: Int32s
    rows: int


@lru_cache(maxsize=4096)
def forward_fields(shape: ForwardShape, windows: int, padding_slot: int) -> Fields:
    """Return where the arrays of a forward pass lie, for a model with so many distinct windows."""
    rows, fields = shape.rows, list[Field]()
    for number in range(windows):
        fields += [
            Field(f"starts {number}", (4,)),
            Field(f"firsts {number}", (rows,)),
            Field(f"bits {number}", (rows, shape.words)),
            Field(f"combine {number}", (rows, 3)),
            Field(f"items {number}", (MAX_ITEMS + rows, 8), ragged=number == windows - 1),
        ]
    return Fields(
        (
            Field("tokens", (rows,)),
            Field("sources", (rows,), -1),
            Field("positions", (rows,)),
            Field("slots", (rows,), padding_slot),
            Field("limits", (rows,)),
            *fields,
        )
    )


def forward_arrays(
    layout: Layout, plan: AttentionArrays, windows: Sequence[int | None], sources: Mapping[int, int]
) -> Arrays:
    """Return the arrays of a forward pass; `sources` by span."""
    arrays: dict[str, NDArray[np.integer]] = {
        "tokens": layout.tokens,
        "sources": _sources(layout, sources),
        "positions": layout.positions,
        "slots": layout.slots,
        "limits": plan.limits,
    }
    for number, window in enumerate(windows):
        work = plan.works[window]
        arrays |= {f"{name} {number}": getattr(work, name) for name in AttentionWork._fields}
    return arrays


def attention_shape(plan: AttentionArrays) -> tuple[Tiles, bool]:
    """Return which tile sizes occur in a step, and whether any row has partial results to combine."""
    works = plan.works.values()
    tiles = np.any([np.diff(work.starts) > 0 for work in works], axis=0)
    return tuple(tiles.tolist()), any(bool(work.combine[:, 2].any()) for work in works)


def forward_shape(rows: int, plan: AttentionArrays) -> ForwardShape:
    """Return the padded shape of a pass of `rows`. Captured passes with a prompt chunk, but no trees, have
    one shape for each number of rows: a tile size that does not occur costs an empty launch, while each
    combination of tile sizes would need a graph. Those with trees may always combine partial results."""
    words = max(work.bits.shape[1] for work in plan.works.values())
    shape = ForwardShape(bucket(rows) or rows, words, *attention_shape(plan))
    if shape.captured and words:
        return replace(shape, combined=True)
    if shape.captured and shape.tiles != SMALLEST_TILE:
        return replace(shape, tiles=ALL_TILES, combined=True)
    return shape


def forward_shapes(sequences: int) -> list[ForwardShape]:
    """Return the shapes of steps without token trees in which up to `sequences` sequences decode, the largest
    first."""
    most = bucket(min(sequences, ROWS[-1])) or ROWS[-1]
    mixed = [ForwardShape(rows, 0, ALL_TILES, True) for rows in ROWS]
    decoding = [
        ForwardShape(rows, 0, SMALLEST_TILE, combined)
        for rows in ROWS
        if rows <= most
        for combined in (True, False)
    ]
    return sorted(mixed + decoding, key=lambda shape: -shape.rows)


def sample_shapes(sequences: int) -> list[SampleShape]:
    """Return the shapes of sampling one token for each of up to `sequences` sequences, the largest first."""
    most = bucket(min(sequences, ROWS[-1])) or ROWS[-1]
    return [SampleShape(rows, 1) for rows in reversed(ROWS) if rows <= most]


def chain_forward_shapes(rows: int, levels: int) -> list[ForwardShape]:
    """Return the shapes of verifying chains of up to `levels` draft tokens, of so many rows in all, the
    largest first."""
    words = -(-(levels + 1) // 32)
    occurring = [(True, False, False), (False, True, False), (True, True, False)]
    return [
        ForwardShape(size, words, tiles, True)
        for size in reversed(ROWS)
        if 1 < size <= rows
        for tiles in occurring
    ]


def chain_sample_shapes(rows: int, levels: int) -> list[SampleShape]:
    """As chain_forward_shapes, of the choice of tokens."""
    depths = sorted({bucket(level + 1, DEPTHS) or DEPTHS[-1] for level in range(1, levels + 1)})
    return [
        SampleShape(size, depth)
        for size in reversed(ROWS)
        if size <= rows
        for depth in depths
        if size >= depth
    ]


def placed(tokens: NDArray[np.integer]) -> Int32s:
    """Return where in the results each of `tokens` is that is given by its place; -1 for others."""
    sources: Int32s = np.where(tokens < 0, RESULTS - 1 - tokens, -1).astype(np.int32)
    return sources


def _sources(layout: Layout, sources: Mapping[int, int]) -> Int32s:
    rows = placed(layout.tokens)
    rows[layout.offsets[list(sources)]] = list(sources.values())
    return rows


@lru_cache(maxsize=4096)
def sample_fields(shape: SampleShape) -> Fields:
    """Return where the arrays of a sampling pass lie."""
    nodes = shape.nodes
    plain = Field("rows", (nodes,)), Field("draws", (nodes, DRAW_WORDS))
    if shape.depth == 1:
        return Fields(plain)
    names = "tokens", "parents", "slots"
    fields = (Field(name, (nodes,)) for name in names)
    return Fields((*plain, *fields, Field("sources", (nodes,), -1), Field("firsts", (nodes + 1,))))


def padding(fields: Fields) -> Arrays:
    """Return the arrays of a pass that computes padding alone."""
    return {field.name: np.zeros(0, np.int32) for field in fields.fields}


def sample_arrays(nodes: Nodes, shape: SampleShape) -> Arrays:
    """Return the arrays; the padding trees are empty."""
    firsts = np.full(shape.nodes + 1, nodes.firsts[-1], np.int32)
    firsts[: len(nodes.firsts)] = nodes.firsts
    return {
        "rows": nodes.rows,
        "draws": nodes.draws,
        "tokens": nodes.tokens,
        "sources": placed(nodes.tokens),
        "parents": nodes.parents,
        "slots": nodes.slots,
        "firsts": firsts,
    }
