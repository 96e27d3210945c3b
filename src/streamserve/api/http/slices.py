"""What connections have sent, taken in small slices between the loop's other events.

64 KiB of the network's data can be thousands of tiny WebSocket frames or pipelined requests, each of which
costs Python tens of microseconds, on any number of connections at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SECONDS = 0.005
"""As long as slices are taken before other events have their turn."""

STARTS = 8
"""As many requests are begun before other events have their turn."""


class Slices:
    """Calls functions in turn, each until it has nothing more to do; and begins requests, a few at a time."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()
        self._starts: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def add(self, take: Callable[[], bool]) -> None:
        """Have `take` called, soon, until it returns False. It may be added again after that."""
        self._waiting.append(take)
        self._schedule()

    def start(self, begin: Callable[[], None]) -> None:
        """Have `begin` called once, after those that were given before."""
        self._starts.append(begin)
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
                take = self._waiting.popleft()
                if take():
                    self._waiting.append(take)
        finally:
            self._schedule()
