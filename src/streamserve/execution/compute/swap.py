"""The host pool: KV blocks of evicted sequences, copied out of the caches and back while steps run."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from streamserve.execution.compute.kv_cache import KVCache

Copies = Sequence[tuple[int, int]]


@dataclass
class Copying:
    """Copies that run during a step. `seconds`, their duration, is set when the step has ended."""

    seconds: float = 0.0


class HostPool:
    """A pool of `num_blocks` blocks of host memory for all KV cache groups: one tensor for each of the
    `caches`, [block][layer][k|v][head][slot][vector]. A separate thread copies."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._caches = tuple(caches)
        # Not cleared: blocks are written before they are read, and so memory is committed only when it is
        # used.
        self._blocks = [
            torch.empty((num_blocks, len(cache.data), *cache.data.shape[2:]), dtype=cache.data.dtype)
            for cache in caches
        ]
        self._thread = ThreadPoolExecutor(1, "swap")

    @contextmanager
    def copying(self, copies_out: Copies, copies_in: Copies) -> Iterator[Copying]:
        """Copy blocks out (cache, host), then others back (host, cache), while the body of the `with`
        statement runs. The body must not touch these blocks. The copies are complete when the statement
        ends."""
        copies = Copying()
        future = self._thread.submit(self.copy, copies_out, copies_in)
        try:
            yield copies
        finally:
            copies.seconds = future.result()

    @torch.inference_mode()
    def copy(self, copies_out: Copies, copies_in: Copies) -> float:
        """Copy blocks out (cache, host), then others back (host, cache), in the calling thread. Returns the
        seconds that this took."""
        started = time.perf_counter()
        for cache, blocks in zip(self._caches, self._blocks, strict=True):
            for block, host in copies_out:
                blocks[host].copy_(cache.data[:, block])
            for host, block in copies_in:
                cache.data[:, block].copy_(blocks[host])
        return time.perf_counter() - started

    def close(self) -> None:
        """End the thread and release the memory."""
        self._thread.shutdown()
        self._blocks = []
