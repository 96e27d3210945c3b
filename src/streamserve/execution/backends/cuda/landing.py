"""Landing memory: host memory that other workers write KV to. Landed blocks are copied to the device's
caches.

    prefill worker   device ── a separate stream and thread ──▶ landing memory of the decode worker
    decode worker    landing memory ── KVLanding.land, before the next launch ──▶ device

Blocks have the same numbers and the memory has the same layout as the caches, so any transport can write
here. A step that runs ahead may still write to a block that was allocated again. That does no harm: the step
was launched in the same stream before the copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamserve.execution.compute.kv_cache import KVCache


class KVLanding:
    """The landing memory of all KV cache groups. `memory`, a tensor of bytes, has `num_blocks` blocks of each
    of the `caches`, in their order. `taken` counts copied blocks."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, memory: Tensor) -> None:
        self._device = caches[0].data.device
        self._caches = [cache.as_bytes() for cache in caches]
        widths = [cache.shape[2] for cache in self._caches]
        sizes = [len(cache) * num_blocks * cache.shape[2] for cache in self._caches]
        parts = torch.split(memory, sizes)
        self.pools = [part.view(-1, num_blocks, width) for part, width in zip(parts, widths, strict=True)]
        self.taken = 0

    def land(self, blocks: Sequence[int]) -> None:
        """Copy these blocks of all layers to the caches. On a GPU the copies are launched in the current
        stream, layer by layer through pinned memory, and not waited for."""
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
