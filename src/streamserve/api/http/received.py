"""Data that a connection has received and not parsed yet."""

from collections import deque
from collections.abc import Callable
from functools import partial

from streamserve.api.http.slices import Slices


class ReceivedData:
    """Received data of one connection. It is parsed in slices, in turn with other connections.

    `size` is the number of waiting bytes. The parsing function is referenced only while it is scheduled, so
    that a closed connection is freed at once.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._chunks: deque[bytes] = deque()
        self._scheduled = False
        self.size = 0

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self._chunks.append(data)
        self.size += len(data)

    def pop(self, limit: int) -> bytes:
        """Remove and return a slice of at most `limit` bytes. Raises IndexError if nothing is waiting."""
        data = self._chunks.popleft()
        if len(data) > limit:
            self._chunks.appendleft(data[limit:])
            data = data[:limit]
        self.size -= len(data)
        return data

    def clear(self) -> None:
        """Discard all data."""
        self._chunks.clear()
        self.size = 0

    def schedule(self, parse_next: Callable[[], bool]) -> None:
        """Schedule calls of `parse_next` while data is waiting, until it returns False."""
        if self.size and not self._scheduled:
            self._scheduled = True
            self._slices.add(partial(self._step, parse_next))

    def _step(self, parse_next: Callable[[], bool]) -> bool:
        self._scheduled = parse_next() and self.size > 0
        return self._scheduled
