"""CUDA graphs: the work of a step shape, captured when it first occurs and replayed afterwards.

A step is padded to the next shape (`bucket`), whose inputs and outputs lie at fixed addresses. Padding rows
write their keys and values to a block that no sequence owns.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows that steps are padded to."""


def bucket(count: int, sizes: Sequence[int] = ROWS) -> int | None:
    """Return the smallest of `sizes` (ascending) that holds `count`; None if it is above all of them."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs(Protocol):
    """Runs work whose inputs and outputs have fixed addresses. `shapes`: how often each shape ran; `firsts`:
    runs that took longer than later ones of their shape will, to compile or to capture."""

    shapes: dict[Hashable, int]
    firsts: int

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, which is the same at every call for one `shape`. It must neither wait for the device nor
        depend on values other than those in its buffers."""
        ...


class NoGraphs:
    """Does the work directly, on any device. Buckets and padding are the same as with graphs."""

    def __init__(self) -> None:
        self.shapes: dict[Hashable, int] = {}
        self.firsts = 0

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        self.shapes[shape] = self.shapes.get(shape, 0) + 1
        work()


class CudaGraphs:
    """Captures each shape at its second occurrence: the first runs directly, which also compiles kernels and
    lets libraries allocate. Once the graphs have taken `budget` bytes, further shapes run directly."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device = device
        self._budget = budget
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.shapes: dict[Hashable, int] = {}
        self.firsts = 0
        self.captured = 0
        self.replays = 0
        self.bytes = 0

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        runs = self.shapes[shape] = self.shapes.get(shape, 0) + 1
        self.firsts += runs <= 2
        graph = self._graphs.get(shape)
        if graph is None:
            if runs == 1 or self.bytes >= self._budget:
                work()
                return
            graph = self._graphs[shape] = self._capture(shape, work)
        graph.replay()
        self.replays += 1

    def _capture(self, shape: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as capturing does: the difference is what the graph takes
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        left, _ = torch.cuda.mem_get_info(self._device)
        self.captured += 1
        self.bytes += max(0, free - left)
        log.debug("captured a graph for %s; graphs take %.0f MiB", shape, self.bytes / 2**20)
        return graph
