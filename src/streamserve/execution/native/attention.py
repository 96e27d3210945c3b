"""The kernels' attention as a backend, and a step's spans as the kernels read them."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.kv_cache import KVCache
from streamserve.execution.layout import Layout
from streamserve.execution.native.library import TYPES, CacheLayerStruct, SpanStruct, StepStruct, Team

MOST_QUERIES = 256
"""The most query heads that may share a key-value head."""


class Spans:
    """A layout's spans in the kernels' form. Owns the arrays that they point to."""

    def __init__(self, layout: Layout) -> None:
        self.rows = len(layout.tokens)
        self.slots = np.ascontiguousarray(layout.slots, dtype=np.int64)
        self._owned: list[NDArray[np.int32]] = []
        self.array = (SpanStruct * len(layout.parts))()
        for struct, part in zip(self.array, layout.parts, strict=True):
            span = part.span
            struct.blocks = self._own(span.blocks)
            tree = span.tree is not None and len(span.tree) > 1
            struct.parents = self._own(span.tree.parents) if tree and span.tree else None
            struct.row, struct.rows = part.offset, span.rows
            struct.start, struct.linear = span.start, len(span.tokens)

    def step(self, cos: Tensor | None = None, sin: Tensor | None = None) -> StepStruct:
        return StepStruct(
            spans=cast(self.array, POINTER(SpanStruct)),
            slots=self.slots.ctypes.data,
            cos=None if cos is None else cos.data_ptr(),
            sin=None if sin is None else sin.data_ptr(),
            span_count=len(self.array),
            rows=self.rows,
        )

    def _own(self, values: Sequence[int]) -> int:
        array = np.asarray(values, dtype=np.int32)
        self._owned.append(array)
        return int(array.ctypes.data)


class NativeAttention:
    """execution.attention.AttentionBackend on the kernels."""

    row_invariant = True

    def __init__(self, team: Team, cache: KVCache, windows: Sequence[int | None], group: int) -> None:
        """`windows` for each layer; `group`: query heads that share a key-value head."""
        self.cache = cache
        team.large_pages(cache.data)
        self._team = team
        self._windows = tuple(windows)
        self._group = group
        self._path = team.path(cache.dtype)
        self.spans: Spans | None = None

    def plan(self, layout: Layout) -> None:
        self.spans = Spans(layout)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.spans is not None, "a step is planned before it runs"
        qkv = torch.cat((q, k, v), dim=1).contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        data = self.cache.data[layer]
        cache = CacheLayerStruct(
            data=data.data_ptr(),
            block_size=self.cache.block_size,
            kv_heads=k.shape[1],
            dim=k.shape[2],
            type=TYPES[self.cache.dtype],
        )
        self._team.library.ss_attend(
            self._team.pool,
            ctypes.byref(self.spans.step()),
            ctypes.byref(cache),
            qkv.data_ptr(),
            q.shape[1],
            self._windows[layer] or 0,
            self._path,
            out.data_ptr(),
        )
        return out
