"""The host pool: KV blocks of evicted sequences, copied out of the caches and back beside the steps."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from streamserve.execution.kv_cache import KVCache

Copies = Sequence[tuple[int, int]]


@dataclass
class Copying:
    """Copies that go on beside a step; they took `seconds`, which is known once the step is over."""

    seconds: float = 0.0


class HostPool:
    """`num_blocks` blocks of memory for all planes: of each of the `caches` one tensor
    [block][layer][k|v][head][slot][dim]. A thread of its own copies."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._caches = tuple(caches)
        # Not cleared: no block comes back before it went out, and memory is taken only as it comes into use.
        self._blocks = [
            torch.empty((num_blocks, len(cache.data), *cache.data.shape[2:]), dtype=cache.dtype)
            for cache in caches
        ]
        self._thread = ThreadPoolExecutor(1, "swap")

    @contextmanager
    def copying(self, outs: Copies, backs: Copies) -> Iterator[Copying]:
        """Copy blocks out (cache, host), then others back (host, cache), while the body of `with` runs; it
        must not touch them. They are there when it is left."""
        copies = Copying()
        future = self._thread.submit(self.copy, outs, backs)
        try:
            yield copies
        finally:
            copies.seconds = future.result()

    @torch.inference_mode()
    def copy(self, outs: Copies, backs: Copies) -> float:
        """The same at once; returns how many seconds it took."""
        started = time.perf_counter()
        for cache, blocks in zip(self._caches, self._blocks, strict=True):
            for block, host in outs:
                blocks[host].copy_(cache.data[:, block])
            for host, block in backs:
                cache.data[:, block].copy_(blocks[host])
        return time.perf_counter() - started

    def close(self) -> None:
        """End the thread, and let go of the memory."""
        self._thread.shutdown()
        self._blocks = []
