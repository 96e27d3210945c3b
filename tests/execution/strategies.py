"""Hypothesis strategies that several modules use: token trees, and steps of several sequences."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 9, vocab_size: int = 50, root: int | None = None) -> TokenTree:
    size = draw(st.integers(1, max_nodes))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    tokens = [draw(st.integers(0, vocab_size - 1)) for _ in range(size)]
    if root is not None:
        tokens[0] = root
    return TokenTree(tuple(tokens), parents, (0.0,) * size, (1.0,) * size)


@dataclass(frozen=True)
class Step:
    """Spans of several sequences in one pool, with blocks in random order."""

    spans: list[Span]
    num_blocks: int
    block_size: int


@st.composite
def steps(draw: st.DrawFn, max_sequences: int = 4, max_start: int = 30, max_chunk: int = 12) -> Step:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    spans: list[Span] = []
    for number in range(draw(st.integers(1, max_sequences))):
        tokens = [0] * draw(st.integers(1, max_chunk))
        tree = draw(st.none() | trees(root=0))
        spans.append(Span(number, draw(st.integers(0, max_start)), tokens, [], tree, (0,) if tree else ()))
    sizes = [-(-(span.start + span.query_tokens) // block_size) for span in spans]
    num_blocks = sum(sizes) + draw(st.integers(0, 3))
    blocks = np.random.default_rng(draw(st.integers(0, 99))).permutation(num_blocks)
    for span, table in zip(spans, np.split(blocks, np.cumsum(sizes)), strict=False):
        span.blocks.extend(table.tolist())
    return Step(spans, num_blocks, block_size)
