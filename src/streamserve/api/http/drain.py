"""Leaving in good order: no new requests, while those that are open go on to their end."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from streamserve.protocol.errors import RequestError


class Drain:
    """Which requests are open, and whether new ones are taken."""

    def __init__(self) -> None:
        self.open = 0
        self.draining = False
        self._until = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, seconds: float = 0.0) -> None:
        """Take no new requests. `seconds` is how long this may last, if the server ends then."""
        self.draining = True
        self._until = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """After how many seconds a refused client is to come again."""
        return max(1.0, self._until - time.monotonic())

    def end(self) -> None:
        """Take requests again."""
        self.draining = False

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as open. Raises RequestError (503) if none are taken any more."""
        if self.draining:
            raise RequestError(
                "the server is draining: it takes no new requests", status=503, retry_after=self.seconds_left
            )
        self.open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()
