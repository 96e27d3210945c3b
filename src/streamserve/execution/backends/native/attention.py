"""The attention backend with the kernels, and the conversion of a step's spans to their structures."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, cast, pointer

import torch
from torch import Tensor

from streamserve.execution.backends.native.library import TYPES, ThreadPool
from streamserve.execution.backends.native.structures import (
    CacheLayerStruct,
    LoraStruct,
    SpanStruct,
    StepStruct,
    packer,
)
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.attention import PLAIN, Scoring
from streamserve.execution.model.layout import Layout, SpanRows

MAX_QUERY_GROUP = 256
"""Maximum number of query heads that share a key-value head."""


_SPAN = packer(SpanStruct)


class Spans:
    """A layout's spans as structures of the kernels. Owns the arrays that these point to."""

    def __init__(self, layout: Layout) -> None:
        self.rows = len(layout.tokens)
        self.slots = layout.slots
        numbers = array("i")
        offsets = []
        for part in layout.parts:
            tree = part.span.tree
            offsets.append(len(numbers))
            numbers.extend(part.span.blocks)
            if tree is not None and len(tree) > 1:
                numbers.extend(tree.parents)
        self._numbers = numbers
        base, size = numbers.buffer_info()[0], numbers.itemsize
        structs = b"".join(
            _span(part, base + offset * size, size)
            for part, offset in zip(layout.parts, offsets, strict=True)
        )
        self._structs = (SpanStruct * len(layout.parts)).from_buffer_copy(structs)

    def step(
        self,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        lora: LoraStruct | None = None,
        query_scales: Tensor | None = None,
    ) -> StepStruct:
        """Return the step's structure for the kernels. `cos` and `sin` rotate the rows' queries and keys,
        `query_scales` multiply the queries, and `lora` has the rows' adapters."""
        return StepStruct(
            spans=cast(self._structs, POINTER(SpanStruct)),
            slots=self.slots.ctypes.data,
            cos=None if cos is None else cos.data_ptr(),
            sin=None if sin is None else sin.data_ptr(),
            query_scales=None if query_scales is None else query_scales.data_ptr(),
            lora=None if lora is None else pointer(lora),
            span_count=len(self._structs),
            rows=self.rows,
        )


def _span(part: SpanRows, blocks: int, size: int) -> bytes:
    """Return a span packed as cpp/attention.h: Span. `blocks` is the address of its block table; a tree's
    parents follow the table in memory."""
    span = part.span
    parents = 0 if span.tree is None or len(span.tree) == 1 else blocks + len(span.blocks) * size
    skip = span.skip  # if it skips the root, `linear` is below 1, so that the root stays before the rows
    return _SPAN.pack(
        blocks, parents, part.offset, span.query_tokens - skip, span.start + skip, len(span.tokens) - skip
    )


class NativeAttention:
    """The attention backend (execution.model.attention.AttentionBackend) with the kernels."""

    row_invariant = True

    def __init__(
        self,
        pool: ThreadPool,
        cache: KVCache,
        windows: Sequence[int | None],
        group: int,
        scoring: Scoring = PLAIN,
    ) -> None:
        """`windows`: the window of each layer. `group`: the number of query heads for each key-value head."""
        self.cache = cache
        pool.large_pages(cache.data)
        self._pool = pool
        self._windows = tuple(windows)
        self._group = group
        self._scoring = scoring
        self._path = pool.path(cache.dtype)
        self.spans: Spans | None = None

    def plan(self, layout: Layout) -> None:
        self.spans = Spans(layout)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
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
            quantized=self.cache.quantized,
        )
        self._pool.library.ss_attend(
            self._pool.handle,
            ctypes.byref(self.spans.step()),
            ctypes.byref(cache),
            qkv.data_ptr(),
            q.shape[1],
            self._windows[layer] or 0,
            self._scoring.scale or k.shape[2] ** -0.5,
            self._scoring.cap,
            None if sinks is None else sinks.data_ptr(),
            self._path,
            out.data_ptr(),
        )
        self.cache.written += 1
        return out
