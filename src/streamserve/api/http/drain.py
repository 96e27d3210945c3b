"""Graceful shutdown: refuse new requests while open ones run to completion."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from streamserve.protocol.errors import RequestError


class RequestGate:
    """Counts the open requests, and knows whether new ones are accepted."""

    def __init__(self) -> None:
        self.open = 0
        self.draining = False
        self._until = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._begun = asyncio.Event()
        self._accepting = asyncio.Event()
        self._accepting.set()

    def begin(self, seconds: float = 0.0) -> None:
        """Refuse new requests. If the server is shutting down, `seconds` is the limit for the open ones to
        finish."""
        self.draining = True
        self._begun.set()
        self._accepting.clear()
        self._until = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """The number of seconds after which a refused client should retry."""
        return max(1.0, self._until - time.monotonic())

    def end(self) -> None:
        """Accept requests again."""
        self.draining = False
        self._begun.clear()
        self._accepting.set()

    async def begun(self) -> None:
        """Wait until requests are refused."""
        await self._begun.wait()

    async def accepting(self) -> None:
        """Wait until requests are accepted."""
        await self._accepting.wait()

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def check_accepting(self) -> None:
        """Raises RequestError (503) while draining."""
        if self.draining:
            raise RequestError(
                "the server is draining: it takes no new requests", status=503, retry_after=self.seconds_left
            )

    @contextmanager
    def request(self, accepted: bool = False) -> Iterator[None]:
        """Count a request as open. Raises RequestError (503) while draining, unless it was `accepted`
        before."""
        if not accepted:
            self.check_accepting()
        self.open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()
