"""Where a step's query tokens lie: all spans' rows one behind another, their positions and cache slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamserve.engine.plan import Span
from streamserve.policy.tree import TokenTree

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SpanRows:
    """A span's share of the step. Row `offset + i` is its i-th query token, kept in slot `slots[i]`.
    `positions` are those of all the sequence's slots, from 0 on: tree nodes of equal depth share one."""

    span: Span
    offset: int
    positions: Ints
    slots: Ints

    @property
    def root(self) -> int:
        """The step's row of the last committed token, a tree's root; node n is n rows further."""
        return self.offset + len(self.span.tokens) - 1


@dataclass(frozen=True)
class Layout:
    """A step's rows: `tokens`, `positions` and `slots` [rows], and each span's part of them."""

    parts: list[SpanRows]
    tokens: Ints
    positions: Ints
    slots: Ints

    def sampled_rows(self) -> list[int]:
        """The rows of all trees' nodes, span by span: those whose logits choose tokens."""
        return [
            row
            for part in self.parts
            if part.span.tree
            for row in range(part.root, part.offset + part.span.rows)
        ]


def lay_out(spans: Sequence[Span], block_size: int) -> Layout:
    """Pack `spans`. Raises ValueError for one that contradicts itself, as a wrong cache would follow."""
    parts: list[SpanRows] = []
    tokens: list[int] = []
    for span in spans:
        _check(span, block_size)
        block, slot = np.divmod(np.arange(span.start, span.start + span.rows), block_size)
        slots = np.asarray(span.blocks, dtype=np.int64)[block] * block_size + slot
        parts.append(SpanRows(span, len(tokens), _positions(span), slots))
        tokens += span.tokens
        if span.tree:
            tokens += span.tree.tokens[1:]
    return Layout(
        parts,
        np.asarray(tokens, dtype=np.int64),
        np.concatenate([part.positions[part.span.start :] for part in parts]),
        np.concatenate([part.slots for part in parts]),
    )


def _positions(span: Span) -> Ints:
    positions = np.arange(span.start + span.rows)
    if span.tree:
        root = span.start + len(span.tokens) - 1
        positions[root:] = root + np.asarray(span.tree.depths())
    return positions


def _check(span: Span, block_size: int) -> None:
    if not span.tokens:
        raise ValueError(f"sequence {span.sequence}: its span has no tokens")
    if len(span.blocks) * block_size < span.start + span.rows:
        raise ValueError(f"sequence {span.sequence}: {len(span.blocks)} blocks cannot hold its span")
    if span.tree and span.tree.tokens[0] != span.tokens[-1]:
        raise ValueError(f"sequence {span.sequence}: the tree's root is not the span's last token")
    if span.tree and len(span.tree) > 1 and len(span.choices) > 1:
        raise ValueError(f"sequence {span.sequence}: choices can fork only where nothing is guessed")


def ancestors(tree: TokenTree) -> NDArray[np.bool_]:
    """Which nodes are on the path to which: [node, other], true where `other` is, itself included."""
    matrix = np.eye(len(tree), dtype=bool)
    for node, parent in enumerate(tree.parents[1:], start=1):
        matrix[node] |= matrix[parent]
    return matrix
