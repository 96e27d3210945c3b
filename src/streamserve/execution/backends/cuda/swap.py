"""The host pool of a device: KV blocks of evicted sequences, copied by a separate stream while steps run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from streamserve.execution.backends.cuda.buffers import new_event, new_stream
from streamserve.execution.compute.kv_cache import KVCache

Copies = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Swapping:
    """Copies that were launched with a step. On a GPU they take place between the events `started` and
    `ended`; on the CPU they took `seconds`."""

    started: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    seconds: float = 0.0

    def wait(self) -> float:
        """Wait for the copies; return the seconds that they took."""
        if self.started is None or self.ended is None:
            return self.seconds
        self.ended.synchronize()
        return float(self.started.elapsed_time(self.ended)) / 1000


class DeviceHostPool:
    """A pool of `num_blocks` blocks of pinned host memory for all KV cache groups: one tensor for each of the
    `caches`, [block][layer][k|v][head][slot][dim]."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._caches = tuple(caches)
        device = caches[0].data.device
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._copying = False
        self._blocks = [
            torch.empty(
                (num_blocks, len(cache.data), *cache.data.shape[2:]),
                dtype=cache.data.dtype,
                pin_memory=self._stream is not None,
            )
            for cache in caches
        ]

    def begin(self, copies_out: Copies, copies_in: Copies) -> Swapping | None:
        """Launch copies out (cache, host), then others back (host, cache), after all work launched so far.
        Returns None without copies. The device starts the next step after they have ended."""
        if self._copying and self._stream is not None:  # the step before had copies: this step follows them
            torch.cuda.current_stream().wait_stream(self._stream)
        self._copying = bool(copies_out or copies_in)
        if not self._copying:
            return None
        if self._stream is None:
            started = time.perf_counter()
            self._copy(copies_out, copies_in)
            return Swapping(None, None, time.perf_counter() - started)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        begun, ended = new_event(timed=True), new_event(timed=True)
        with torch.cuda.stream(self._stream):
            begun.record()
            self._copy(copies_out, copies_in)
            ended.record()
        return Swapping(begun, ended)

    def _copy(self, copies_out: Copies, copies_in: Copies) -> None:
        for cache, blocks in zip(self._caches, self._blocks, strict=True):
            for block, host in copies_out:
                blocks[host].copy_(cache.data[:, block], non_blocking=True)
            for host, block in copies_in:
                cache.data[:, block].copy_(blocks[host], non_blocking=True)

    def close(self) -> None:
        """Release the memory."""
        self._blocks = []
