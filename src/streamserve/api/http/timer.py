"""One timeout of a connection."""

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable


class Timer:
    """Calls a function after `seconds`, unless it is stopped before.

    It references the function only while it runs, so that a closed connection is freed at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._handle: TimerHandle | None = None

    def start(self, expired: Callable[[], None]) -> None:
        """Start the timer, unless it runs already; call `expired` at the end."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._end, expired)

    def stop(self) -> None:
        """Stop the timer, if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self, expired: Callable[[], None]) -> None:
        self._handle = None
        expired()
