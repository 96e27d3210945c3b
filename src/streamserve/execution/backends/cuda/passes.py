"""The shapes that passes on a device are padded to, and the layouts of their arrays in the uploaded
buffers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.backends.cuda.attention import TILES, AttentionArrays, AttentionWork
from streamserve.execution.backends.cuda.buffers import Arrays, BufferFields, Field
from streamserve.execution.backends.cuda.draws import DRAW_WORDS
from streamserve.execution.backends.cuda.graphs import CAPTURED_ROWS, ROWS, bucket
from streamserve.execution.model.layout import Layout

Int32s = NDArray[np.int32]

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Path lengths that steps are padded to: tokens of the longest path of a step's trees, root included."""

MAX_WORDS = 4
"""Maximum words of the tree masks in captured passes, for trees of up to 128 nodes."""

RESULTS = ROWS[-1] * (1 + 2 * DEPTHS[-1])
"""Capacity of the results of a sampling pass, in int32."""

MAX_PASSES = 32
"""Maximum passes of a loop that drafts chains; the chains have one token more."""

PLACES = (MAX_PASSES + 1) * 2 * ROWS[-1]
"""Number of places for draft tokens, after the results. A token -1 - p in a pass stands for the token that is
at place p when the pass runs."""

MAX_ITEMS = 4096
"""Maximum items of attention's work in a step, in addition to one for each row."""


Tiles = tuple[bool, ...]

SMALLEST_TILE: Tiles = (True,) + (False,) * (len(TILES) - 1)
ALL_TILES: Tiles = (True,) * len(TILES)


@dataclass(frozen=True)
class ForwardShape:
    """The padded shape of a forward pass. `words`: words of the tree masks. `tiles`: whether each tile size
    of attention may occur. `combined`: whether any row's keys may be split."""

    rows: int
    words: int
    tiles: Tiles
    combined: bool

    @property
    def captured(self) -> bool:
        """Whether the pass is small enough to be worth a graph."""
        return self.rows <= CAPTURED_ROWS


@dataclass(frozen=True)
class SampleShape:
    """The padded shape of a sampling pass: `nodes` rows of logits, of trees with paths of up to `depth`
    tokens. `scored`: of single tokens, with the probability of the likeliest one."""

    nodes: int
    depth: int
    scored: bool = False

    @property
    def results(self) -> int:
        """Number of int32 that the pass returns: tokens (and probabilities), or lengths, tokens and paths."""
        return self.nodes * (1 + self.scored if self.depth == 1 else 1 + 2 * self.depth)


@dataclass(frozen=True)
class Nodes:
    """The tree nodes to sample at, tree by tree (int32). The first trees are walked on the device; the host
    reads the logits of the others.

    * `rows` [nodes]: the nodes' rows of the hidden states.
    * `tokens` [nodes]: draft tokens; negative: given by their place.
    * `parents`, `slots` [nodes]: the nodes' parents in their tree, and the slots of their KV.
    * `firsts` [walked trees + 1]: the first node of each walked tree, and the end of the last one.
    * `draws` [nodes, words]: see cuda/draws.py.
    * `depth`: tokens of the longest path, root included.
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
    """A prepared forward pass of `rows` rows: its shape, its arrays, and the block `tables` of its spans. The
    upload of the tables has been launched."""

    shape: ForwardShape
    arrays: Arrays
    tables: Int32s
    rows: int


@lru_cache(maxsize=4096)
def forward_fields(shape: ForwardShape, windows: int, padding_slot: int) -> BufferFields:
    """Return the layout of a forward pass's arrays, for a model with `windows` distinct windows."""
    rows, fields = shape.rows, list[Field]()
    for number in range(windows):
        fields += [
            Field(f"starts {number}", (4,)),
            Field(f"firsts {number}", (rows,)),
            Field(f"bits {number}", (rows, shape.words)),
            Field(f"combine {number}", (rows, 3)),
            Field(f"items {number}", (MAX_ITEMS + rows, 8), ragged=number == windows - 1),
        ]
    return BufferFields(
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
    """Return the arrays of a forward pass. `sources` maps spans to the results that have their token."""
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
    """Return whether each tile size occurs in a step, and whether any row has partial results to combine."""
    works = plan.works.values()
    tiles = np.any([np.diff(work.starts) > 0 for work in works], axis=0)
    return tuple(tiles.tolist()), any(bool(work.combine[:, 2].any()) for work in works)


def forward_shape(rows: int, plan: AttentionArrays) -> ForwardShape:
    """Return the padded shape of a pass of `rows` rows.

    Captured passes with a prompt chunk and without trees have one shape for each number of rows: a tile size
    that does not occur costs an empty launch, but each combination of tile sizes would need a graph. In
    captured passes with trees, partial results are always combined, for the same reason.
    """
    words = max(work.bits.shape[1] for work in plan.works.values())
    shape = ForwardShape(bucket(rows) or rows, words, *attention_shape(plan))
    if shape.captured and words:
        return replace(shape, combined=True)
    if shape.captured and shape.tiles != SMALLEST_TILE:
        return replace(shape, tiles=ALL_TILES, combined=True)
    return shape


def forward_shapes(sequences: int) -> list[ForwardShape]:
    """Return the shapes of passes without token trees in which up to `sequences` sequences decode, the
    largest first."""
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
    """Return the shapes of passes that sample one token for each of up to `sequences` sequences, the largest
    first."""
    most = bucket(min(sequences, ROWS[-1])) or ROWS[-1]
    return [SampleShape(rows, 1) for rows in reversed(ROWS) if rows <= most]


def chain_forward_shapes(rows: int, levels: int) -> list[ForwardShape]:
    """Return the shapes of forward passes that verify chains of up to `levels` draft tokens, with up to
    `rows` rows together, the largest first."""
    words = -(-(levels + 1) // 32)
    occurring = [(True, False, False), (False, True, False), (True, True, False)]
    return [
        ForwardShape(size, words, tiles, True)
        for size in reversed(ROWS)
        if 1 < size <= rows
        for tiles in occurring
    ]


def chain_sample_shapes(rows: int, levels: int) -> list[SampleShape]:
    """Return the shapes of sampling passes that verify chains of up to `levels` draft tokens, with up to
    `rows` rows together, the largest first."""
    depths = sorted({bucket(level + 1, DEPTHS) or DEPTHS[-1] for level in range(1, levels + 1)})
    return [
        SampleShape(size, depth)
        for size in reversed(ROWS)
        if size <= rows
        for depth in depths
        if size >= depth
    ]


def placed(tokens: NDArray[np.integer]) -> Int32s:
    """Return, for each of `tokens`, the index in the results on the device from which the pass reads it; -1
    for a token that is known to the host. A negative token -1 - p is read from place p."""
    sources: Int32s = np.where(tokens < 0, RESULTS - 1 - tokens, -1).astype(np.int32)
    return sources


def _sources(layout: Layout, sources: Mapping[int, int]) -> Int32s:
    rows = placed(layout.tokens)
    rows[layout.offsets[list(sources)]] = list(sources.values())
    return rows


@lru_cache(maxsize=4096)
def sample_fields(shape: SampleShape) -> BufferFields:
    """Return the layout of a sampling pass's arrays."""
    nodes = shape.nodes
    plain = Field("rows", (nodes,)), Field("draws", (nodes, DRAW_WORDS))
    if shape.depth == 1:
        return BufferFields(plain)
    names = "tokens", "parents", "slots"
    fields = (Field(name, (nodes,)) for name in names)
    return BufferFields((*plain, *fields, Field("sources", (nodes,), -1), Field("firsts", (nodes + 1,))))


def padding(fields: BufferFields) -> Arrays:
    """Return the arrays of a pass that computes only padding."""
    return {field.name: np.zeros(0, np.int32) for field in fields.fields}


def sample_arrays(nodes: Nodes, shape: SampleShape) -> Arrays:
    """Return the arrays of a sampling pass. Padding trees are empty."""
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
