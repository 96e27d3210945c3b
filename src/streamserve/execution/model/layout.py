"""The layout of a step's query tokens: the concatenated rows of all spans, their positions and cache
slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree

Ints = NDArray[np.int64]


class SpanRows(msgspec.Struct, frozen=True, dict=True):
    """The rows of one span in a step. Row `offset + i` is the span's i-th query token that is not skipped;
    its KV goes to slot `slots[i]`."""

    span: Span
    offset: int
    slots: Ints

    @cached_property
    def positions(self) -> Ints:
        """The positions of all slots of the sequence, from the first one on. Tree nodes of equal depth have
        equal positions."""
        positions = np.arange(self.span.start + self.span.query_tokens)
        positions[self.span.start :] = _positions(self.span)
        return positions

    @property
    def root(self) -> int:
        """The row of the span's last committed token, which is the tree's root. Node n is in row
        `root + n`."""
        return self.offset + len(self.span.tokens) - 1


@dataclass(frozen=True)
class Layout:
    """The rows of a step: `tokens`, `positions` and `slots` [rows], and the `spans`, which begin at the rows
    `offsets` [spans]. `tables`: the block tables [spans, width], padded with 0; only set for steps with one
    row a span that reuse the arrays of the step before."""

    spans: Sequence[Span]
    offsets: Ints
    tokens: Ints
    positions: Ints
    slots: Ints
    tables: NDArray[np.int32] | None = None

    @cached_property
    def parts(self) -> list[SpanRows]:
        starts = self.offsets.tolist()
        ends = [*starts, len(self.tokens)][1:]
        return [
            SpanRows(span, start, self.slots[start:end])
            for span, start, end in zip(self.spans, starts, ends, strict=True)
        ]

    def sampled_rows(self) -> list[int]:
        """Return the rows of all trees' nodes, span by span. Their logits choose tokens."""
        return [
            row
            for part in self.parts
            if part.span.tree is not None
            for row in range(part.root, part.offset + part.span.query_tokens)
        ]


def lay_out(spans: Sequence[Span], block_size: int) -> Layout:
    """Return the layout of `spans`. Raises ValueError for an inconsistent span, which would corrupt the
    cache."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    offsets = []
    for span in spans:
        query_tokens, start, blocks = _check(span, block_size), span.start, span.blocks
        offsets.append(len(tokens))
        if query_tokens == 1:  # a short cut for decoding sequences, which are the most spans
            tokens.append(span.tokens[0])
            positions.append(start)
            slots.append(blocks[start // block_size] * block_size + start % block_size)
            continue
        draft_tokens = () if span.tree is None else span.tree.tokens[1:]
        tokens += [*span.tokens, *draft_tokens][span.skip :]
        positions += _positions(span)[span.skip :]
        for position in range(start + span.skip, start + query_tokens):
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    return Layout(spans, _ints(offsets), _ints(tokens), _ints(positions), _ints(slots))


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def _positions(span: Span) -> Sequence[int]:
    """Return the positions of a span's rows."""
    committed = range(span.start, span.start + len(span.tokens))
    if span.tree is None or len(span.tree) == 1:
        return committed
    return [*committed, *(committed[-1] + depth for depth in span.tree.depths()[1:])]


def _check(span: Span, block_size: int) -> int:
    """Return the number of a span's query tokens. Raises ValueError for an inconsistent span."""
    tokens, tree, query_tokens = span.tokens, span.tree, span.query_tokens
    if not tokens:
        raise ValueError(f"sequence {span.sequence}: its span has no tokens")
    if not 0 <= span.skip < query_tokens:
        raise ValueError(f"sequence {span.sequence}: its span skips {span.skip} of {query_tokens} rows")
    if len(span.blocks) * block_size < span.start + query_tokens:
        raise ValueError(f"sequence {span.sequence}: {len(span.blocks)} blocks cannot hold its span")
    if tree is not None and tree.tokens[0] != tokens[-1]:
        raise ValueError(f"sequence {span.sequence}: the tree's root is not the span's last token")
    if tree is not None and len(span.choices) > 1 and len(tree.tokens) > 1:
        raise ValueError(f"sequence {span.sequence}: choices can fork only without draft tokens")
    return query_tokens


def ancestors(tree: TokenTree) -> NDArray[np.bool_]:
    """Return the ancestor matrix [node, other]: true if `other` is on the path from the root to `node`,
    `node` included."""
    matrix = np.eye(len(tree), dtype=bool)
    for node, parent in enumerate(tree.parents[1:], start=1):
        matrix[node] |= matrix[parent]
    return matrix
