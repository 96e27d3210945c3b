"""Processes received data in small slices, between other events of the event loop.

64 KiB of received data can be thousands of tiny WebSocket frames or pipelined requests, each of which costs
Python tens of microseconds, on any number of connections at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SECONDS = 0.005
"""Seconds for which slices are processed before other events of the loop run."""

STARTS = 8
"""Number of requests started before other events of the loop run."""


class Slices:
    """Calls functions in turn, each until it has no more work, and starts requests a few at a time."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()
        self._starts: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def add(self, work: Callable[[], bool]) -> None:
        """Schedule calls of `work` until it returns False. Afterwards it may be added again."""
        self._waiting.append(work)
        self._schedule()

    def start(self, start_request: Callable[[], None]) -> None:
        """Schedule one call of `start_request`, after the calls scheduled earlier."""
        self._starts.append(start_request)
        self._schedule()

    def _schedule(self) -> None:
        if (self._waiting or self._starts) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + SECONDS
        try:
            for _ in range(min(STARTS, len(self._starts))):
                self._starts.popleft()()
            while self._waiting and time.perf_counter() < end:
                work = self._waiting.popleft()
                if work():
                    self._waiting.append(work)
        finally:
            self._schedule()
