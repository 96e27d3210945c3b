"""Random cases of attention, and how a layer is run on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree, root
from streamserve.execution.backends.cuda.attention import (
    AttentionArrays,
    AttentionWork,
    plan_attention,
    workspace_size,
)
from streamserve.execution.backends.reference.attention import ReferenceAttention
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.layout import Layout, lay_out
from tests.execution.kv_spec import SPEC

Attend = Callable[..., None]

BLOCK_SIZES = (1, 3, 4, 16, 32, 256)
STARTS = (0, 1, 15, 16, 17, 63, 64, 65, 130, 700)
CHUNKS = (1, 1, 1, 2, 5, 17, 40)
TREE_SIZES = (2, 5, 9, 32, 33, 40)
WINDOWS = (1, 2, 3, 7, 20, 64, 150)


@dataclass(frozen=True)
class Case:
    """A step on a cache full of random history, with two layers: one with a window, one without."""

    layout: Layout
    cache: KVCache
    group: int
    windows: tuple[int, None]
    q: Tensor
    expected: list[Tensor]
    max_partials: int
    multiprocessors: int

    def plan(self) -> AttentionArrays:
        kv_heads = self.cache.data.shape[3]
        return plan_attention(
            self.layout, self.cache.block_size, self.group, kv_heads, self.windows, self.multiprocessors,
            self.max_partials,
        )  # fmt: skip


def random_tree(rng: np.random.Generator, size: int) -> TokenTree:
    parents = (-1, *(int(rng.integers(0, node)) for node in range(1, size)))
    return TokenTree((0,) * size, parents, (0.0,) * size, (1.0,) * size)


def random_spans(rng: np.random.Generator, block_size: int, largest: int) -> tuple[list[Span], int]:
    """Return spans of several sequences, and the number of blocks in their pool. Block tables are shuffled.
    No start or chunk is above `largest`."""
    spans = []
    for number in range(int(rng.integers(1, 5))):
        tokens = [0] * min(largest, int(rng.choice(CHUNKS)))
        tree = random_tree(rng, min(largest, int(rng.choice(TREE_SIZES)))) if rng.random() < 0.4 else root(0)
        tree = tree if rng.random() < 0.7 else None
        start = int(rng.choice([start for start in STARTS if start <= largest]))
        span = Span(number, start, tokens, [], tree, (0,) if tree else ())
        if rng.random() < 0.3:
            span = Span(number, start, tokens, [], tree, skip=int(rng.integers(0, span.query_tokens)))
        spans.append(span)
    sizes = [-(-(span.start + span.query_tokens) // block_size) for span in spans]
    blocks = rng.permutation(sum(sizes) + 2)
    for span, table in zip(spans, np.split(blocks, np.cumsum(sizes)), strict=False):
        span.blocks.extend(table.tolist())
    return spans, len(blocks)


def random_case(seed: int, dims: Sequence[int] = (8, 16, 20), largest: int = 10_000) -> Case:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice(BLOCK_SIZES))
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3, 4, 8, 20]))
    spans, num_blocks = random_spans(rng, block_size, largest)
    return make_case(
        spans, num_blocks, block_size, kv_heads, group, int(rng.choice(dims)), int(rng.choice(WINDOWS)),
        int(rng.choice([0, 4, 40, 500])), int(rng.choice([1, 16, 132])), seed,
    )  # fmt: skip


def make_case(
    spans: Sequence[Span],
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    group: int,
    dim: int,
    window: int,
    max_partials: int = 500,
    multiprocessors: int = 16,
    seed: int = 0,
) -> Case:
    spec = replace(SPEC, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, num_layers=2)
    cache = KVCache(spec, num_blocks, block_size, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    layout = lay_out(spans, block_size)
    reference = ReferenceAttention(cache, (window, None), group)
    reference.plan(layout)
    heads = kv_heads * group
    qkv = torch.randn(len(layout.tokens), heads + 2 * kv_heads, dim, generator=generator)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    expected = [reference.run(layer, q, k, v) for layer in range(2)]
    return Case(layout, cache, group, (window, None), q, expected, max_partials, multiprocessors)


def run_layer(
    attend: Attend,
    case: Case,
    arrays: AttentionArrays,
    layer: int,
    device: torch.device | str = "cpu",
    cache_layer: Tensor | None = None,
    q: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Compute the attention of one layer by `attend` on `device`. Slots that must not be read hold NaN."""
    q = case.q if q is None else q
    rows, heads, dim = q.shape
    out = torch.full((rows, heads, dim), torch.nan, dtype=q.dtype, device=device)
    size = workspace_size(case.max_partials, heads, dim)
    work = AttentionWork(*(torch.from_numpy(array).to(device) for array in arrays.works[case.windows[layer]]))
    attend(
        q.to(device),
        (case.cache.data[layer] if cache_layer is None else cache_layer).to(device),
        work,
        torch.from_numpy(arrays.tables).to(device),
        torch.from_numpy(arrays.limits).to(device),
        out,
        dim**-0.5,
        workspace=torch.full((size,), torch.nan, device=device),
        **options,
    )
    return out.cpu()
