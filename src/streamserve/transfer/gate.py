"""Which blocks of a worker's KV may be written over the network, by reservation.

A write is checked and copied under one lock: after `close` none is in progress, and later ones are refused,
however late a lost writer's bytes arrive.
"""

import threading
from collections.abc import Callable, Iterable


class BlockGate:
    """The open reservations of a worker's own pool. Thread-safe."""

    def __init__(self) -> None:
        self.refused = 0
        """Writes to reservations that were not open, or to blocks that are not theirs."""
        self._open: dict[str, frozenset[int]] = {}
        self._lock = threading.Lock()

    def open(self, reservation: str, blocks: Iterable[int]) -> None:
        """Let these blocks be written for a reservation."""
        with self._lock:
            self._open[reservation] = frozenset(blocks)

    def close(self, reservation: str, doubtful: bool = False) -> None:
        """Let nothing more be written for a reservation, nor what may still be on the way."""
        with self._lock:
            self._open.pop(reservation, None)

    def write(self, reservation: str, blocks: Iterable[int], copy: Callable[[], None]) -> str:
        """Call `copy` if these blocks may be written; return the reason if not, else an empty text."""
        with self._lock:
            own = self._open.get(reservation)
            if own is None or not own.issuperset(blocks):
                self.refused += 1
                return "the reservation is closed" if own is None else "the blocks are not the reservation's"
            copy()
            return ""
