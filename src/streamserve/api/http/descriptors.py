"""The file descriptors that clients cause this process to open: connections, and files of uploads, downloads
and batches.

All are counted against one limit, which leaves a reserve for the server: without descriptors it could not
restart its workers.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from streamserve.protocol.errors import RequestError

RESERVED = 96
"""File descriptors reserved for the server itself, its logs and its first workers. At most half of all
descriptors are reserved."""

RESERVED_PER_WORKER = 8
"""File descriptors reserved for each further worker: its sockets, its pipes, and some during its start."""

RETRY_AFTER = 5.0


class Descriptors:
    """Counts the descriptors that clients hold, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._given = asyncio.Event()

    def acquire(self, count: int = 1) -> bool:
        """Count descriptors that are about to be opened. Return False, without counting any, if the limit
        would be exceeded."""
        if self.held + count > self.limit:
            return False
        self.held += count
        return True

    def give(self, count: int = 1) -> None:
        self.held -= count
        self._given.set()

    @contextmanager
    def file(self) -> Iterator[None]:
        """Count a file that is open within the block. Raises RequestError (503) if too many are open."""
        if not self.acquire():
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
        """Count files that are open within the block. Waits until the limit allows them."""
        while not self.acquire(count):
            self._given.clear()
            await self._given.wait()
        try:
            yield
        finally:
            self.give(count)


def client_descriptors(workers: int = 0) -> Descriptors:
    """Return the descriptors of this process for clients. Descriptors for up to `workers` workers are
    reserved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return Descriptors(soft - min(RESERVED + RESERVED_PER_WORKER * workers, soft // 2))
