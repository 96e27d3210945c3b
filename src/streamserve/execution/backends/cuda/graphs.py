"""CUDA graphs: capture the work of a step's shape once, and replay it afterwards.

A step is padded to the next shape (`bucket`). A shape's inputs and outputs are at fixed addresses. Padding
rows write their keys and values to a block that no sequence owns.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows that steps are padded to."""

CAPTURED_ROWS = 512
"""Maximum rows of captured forward passes. For larger ones the device takes longer than the host to launch
them."""


def bucket(count: int, sizes: Sequence[int] = ROWS) -> int | None:
    """Return the smallest of `sizes` (ascending) that is at least `count`; None if all are smaller."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs(Protocol):
    """Runs work whose inputs and outputs have fixed addresses. `shapes` counts the runs of each shape.
    `firsts` counts runs that compiled or captured something, and so took longer than later runs of their
    shape."""

    shapes: dict[Hashable, int]
    firsts: int

    def run(self, shape: Hashable, work: Callable[[], object]) -> None:
        """Run `work`, perhaps by replaying a graph. All calls with one `shape` must pass equal work. It must
        not wait for the device, and must depend only on values in its buffers."""

    def direct(self, shape: Hashable, work: Callable[[], object]) -> None:
        """Run `work` without a graph, for shapes that a graph would not make faster."""

    def prepare(self, shape: Hashable, work: Callable[[], object]) -> None:
        """Run `work`, and capture it for later runs."""


class NoGraphs:
    """Runs all work directly, on any device. Buckets and padding are as with graphs."""

    def __init__(self) -> None:
        self.shapes: dict[Hashable, int] = {}
        self.firsts = 0

    def run(self, shape: Hashable, work: Callable[[], object]) -> None:
        self.direct(shape, work)

    def direct(self, shape: Hashable, work: Callable[[], object]) -> None:
        self.shapes[shape] = self.shapes.get(shape, 0) + 1
        work()

    def prepare(self, shape: Hashable, work: Callable[[], object]) -> None:
        self.run(shape, work)


class CudaGraphs:
    """Captures each shape when it is prepared, or at its second run: the first run is direct, compiles
    kernels and lets libraries allocate. Once the graphs have taken `budget` bytes, only prepared shapes are
    captured; others run directly.

    All graphs share one memory pool: memory that a graph allocates and frees is reused by graphs captured
    later. So the largest shapes should be captured first. `direct_runs` counts runs without a graph."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device = device
        self._budget = budget
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.shapes: dict[Hashable, int] = {}
        self.firsts = 0
        self.captured = 0
        self.replays = 0
        self.direct_runs = 0
        self.bytes = 0

    def run(self, shape: Hashable, work: Callable[[], object]) -> None:
        graph = self._graphs.get(shape)
        if graph is None:
            if shape not in self.shapes or self.bytes >= self._budget:
                self.direct(shape, work)
                return
            self.firsts += 1
            graph = self._capture(shape, work)
        self.shapes[shape] += 1
        graph.replay()
        self.replays += 1

    def direct(self, shape: Hashable, work: Callable[[], object]) -> None:
        self.firsts += shape not in self.shapes
        self.shapes[shape] = self.shapes.get(shape, 0) + 1
        self.direct_runs += 1
        work()

    def prepare(self, shape: Hashable, work: Callable[[], object]) -> None:
        if shape not in self._graphs:
            self.direct(shape, work)
            self._capture(shape, work)

    def _capture(self, shape: Hashable, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # capturing does so too: now the difference is the graph's memory
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        left, _ = torch.cuda.mem_get_info(self._device)
        self._graphs[shape] = graph
        self.captured += 1
        self.bytes += max(0, free - left)
        log.debug("captured a graph for %s; graphs take %.0f MiB", shape, self.bytes / 2**20)
        return graph
