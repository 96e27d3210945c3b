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


class Slices:
    """Calls functions in turn, each until it has nothing more to do."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()
        self._scheduled = False

    def add(self, take: Callable[[], bool]) -> None:
        """Have `take` called, soon, until it returns False. It may be added again after that."""
        self._waiting.append(take)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + SECONDS
        try:
            while self._waiting and time.perf_counter() < end:
                take = self._waiting.popleft()
                if take():
                    self._waiting.append(take)
        finally:
            self._schedule()
