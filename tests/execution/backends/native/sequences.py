"""A sequence whose attention the kernels compute."""

from dataclasses import replace

import numpy as np
import torch

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree
from streamserve.execution.backends.native.attention import NativeAttention
from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.layout import lay_out
from tests.execution.kv_spec import SPEC


class Sequence:
    """A sequence's queries, keys and values by position. Its attention can be computed in any chunks over
    separate blocks."""

    def __init__(
        self,
        pool: ThreadPool,
        length: int,
        dtype: torch.dtype,
        *,
        dim: int = 32,
        kv_heads: int = 2,
        group: int = 3,
        window: int | None = None,
        block_size: int = 16,
        spare: int = 64,
        quantized: bool = False,
        sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        heads = kv_heads * group
        self.q, self.k, self.v = (
            torch.randn(length, count, dim, generator=generator).to(dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        self.sinks = torch.randn(heads, generator=generator) if sinks else None
        spec = replace(SPEC, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        count = -(-(length + spare) // block_size)
        self.cache = KVCache(spec, count, block_size, dtype, quantized=quantized)
        self.cache.data.fill_(-1 if quantized else torch.nan)  # With all bits set, the scale is NaN too.
        self.blocks = np.random.default_rng(0).permutation(count).tolist()
        self.attention = NativeAttention(pool, self.cache, [window], group)

    def span(self, start: int, rows: int, tree: TokenTree | None = None) -> Span:
        return Span(0, start, [0] * rows, self.blocks, tree, (0,) if tree else ())

    def run(self, span: Span, indices: list[int]) -> torch.Tensor:
        """Compute the attention of a span whose rows have the vectors of these positions."""
        self.attention.plan(lay_out([span], self.cache.block_size))
        return self.attention.run(0, self.q[indices], self.k[indices], self.v[indices], self.sinks)

    def whole(self, sizes: list[int]) -> torch.Tensor:
        """Return all rows, computed in chunks of these sizes."""
        out, start = [], 0
        for size in sizes:
            out.append(self.run(self.span(start, size), list(range(start, start + size))))
            start += size
        return torch.cat(out)
