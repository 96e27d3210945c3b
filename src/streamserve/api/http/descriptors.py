"""The file descriptors that clients make this process hold: connections, and files of uploads, downloads and
batches.

They come out of one number, which leaves a reserve for the server: its workers could not be restarted without
descriptors.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from streamserve.protocol.errors import RequestError

RESERVED = 96
"""File descriptors reserved for the server itself, its logs and its first workers; at most half of all."""

RESERVED_PER_WORKER = 8
"""The same for each worker: its sockets, its pipes, and what its start takes for a moment."""

RETRY_AFTER = 5.0


class Descriptors:
    """Counts the descriptors that clients hold, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._given = asyncio.Event()

    def take(self, count: int = 1) -> bool:
        """Count descriptors that are about to be opened. Returns False, and counts none, if too many are."""
        if self.held + count > self.limit:
            return False
        self.held += count
        return True

    def give(self, count: int = 1) -> None:
        """Count closed descriptors."""
        self.held -= count
        self._given.set()

    @contextmanager
    def file(self) -> Iterator[None]:
        """Count a file that is open within the block. Raises RequestError (503) if too many are open."""
        if not self.take():
            raise RequestError(
                f"{self.held} connections and files are open, which is the limit of this server's process "
                "(ulimit -n)",
                status=503,
                retry_after=RETRY_AFTER,
            )
        try:
            yield
        finally:
            self.give()

    @asynccontextmanager
    async def files(self, count: int) -> AsyncIterator[None]:
        """Count files that are open within the block, as soon as that many may be open."""
        while not self.take(count):
            self._given.clear()
            await self._given.wait()
        try:
            yield
        finally:
            self.give(count)


def client_descriptors(workers: int = 0) -> Descriptors:
    """Return the descriptors of this process that are left for clients, besides up to so many workers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return Descriptors(soft - min(RESERVED + RESERVED_PER_WORKER * workers, soft // 2))
