"""Host memory where other workers write KV for a device: what has landed is copied to the device's caches.

    prefill worker   device ── a stream and a thread of their own ──▶ landing memory of the decode worker
    decode worker    landing memory ── KVLanding.take, before the next launch ──▶ device

Blocks have the same numbers and the memory has the same layout as the caches, so any transport writes here. A
step that runs ahead may still write to a block that was allocated again: it was launched before the copy, in
the same stream.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamserve.execution.kv_cache import KVCache


class KVLanding:
    """The landing memory of all KV cache groups: `memory` (bytes) for `num_blocks` blocks of each of the
    `caches`, in this order. `taken` counts the blocks that were copied."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, memory: Tensor) -> None:
        self._device = caches[0].data.device
        self._caches = [cache.as_bytes() for cache in caches]
        widths = [cache.shape[2] for cache in self._caches]
        sizes = [len(cache) * num_blocks * cache.shape[2] for cache in self._caches]
        parts = torch.split(memory, sizes)
        self.pools = [part.view(-1, num_blocks, width) for part, width in zip(parts, widths, strict=True)]
        self.taken = 0

    def take(self, blocks: Sequence[int]) -> None:
        """Copy these blocks of all layers to the caches; on a GPU in the current stream, a layer at a time
        through pinned memory, without waiting for it."""
        if not blocks:
            return
        self.taken += len(blocks)
        host = torch.tensor(blocks)
        there = self._staged(host)
        for pool, cache in zip(self.pools, self._caches, strict=True):
            for landed, layer in zip(pool, cache, strict=True):
                layer.index_copy_(0, there, self._staged(landed.index_select(0, host)))

    def _staged(self, x: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return x
        return x.pin_memory().to(self._device, non_blocking=True)
