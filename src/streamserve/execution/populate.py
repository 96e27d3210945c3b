"""The KV cache's memory, taken before it is needed: the first touch of a page is work for the system, and a
step that meets many new blocks would wait for it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

PIECE = 2 << 20
"""Bytes taken at a time: one large page."""


class Populating:
    """Takes the memory of `pools` [layer, block, …] in the background, all layers of the first blocks first.

    `take` is told an address and how many bytes; once it cannot, this ends. Half of the time is left to
    others. Close it before the memory goes.
    """

    def __init__(self, pools: Sequence[Tensor], take: Callable[[int, int], bool]) -> None:
        self._pools = tuple(pools)
        self._take = take
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until all is taken."""
        self._thread.join()

    def _run(self) -> None:
        for begin, size in (piece for pool in self._pools for piece in pieces(pool)):
            started = time.monotonic()
            if not self._take(begin, size) or self._closing.wait(time.monotonic() - started):
                return


def pieces(pool: Tensor) -> Iterator[tuple[int, int]]:
    """Address and size of pieces of memory [layer, …], of all layers before what lies behind them."""
    layer = pool[0].nbytes
    for offset in range(0, layer, PIECE):
        for number in range(len(pool)):
            yield pool.data_ptr() + number * layer + offset, min(PIECE, layer - offset)
