"""Which blocks of a worker's KV may be written over the network, by reservation.

A write is checked and copied under one lock: after `close` no write is in progress, and later writes are
refused, however late the bytes of a lost writer arrive.
"""

import threading
from collections.abc import Callable, Iterable


class BlockGate:
    """The open reservations of this worker's pool. Thread-safe."""

    def __init__(self) -> None:
        self.refused = 0
        """The number of writes to reservations that were not open, or to blocks outside of their
        reservation."""
        self._open: dict[str, frozenset[int]] = {}
        self._lock = threading.Lock()

    def open(self, reservation: str, blocks: Iterable[int]) -> None:
        """Allow writes to these blocks for a reservation."""
        with self._lock:
            self._open[reservation] = frozenset(blocks)

    def close(self, reservation: str, doubtful: bool = False) -> None:
        """Refuse all further writes for a reservation, including writes in flight, `doubtful` or not."""
        with self._lock:
            self._open.pop(reservation, None)

    def write(self, reservation: str, blocks: Iterable[int], copy: Callable[[], None]) -> str:
        """Call `copy` and return an empty text if these blocks may be written; otherwise return the reason
        why not."""
        with self._lock:
            own = self._open.get(reservation)
            if own is None or not own.issuperset(blocks):
                self.refused += 1
                return "the reservation is closed" if own is None else "the blocks are not the reservation's"
            copy()
            return ""
