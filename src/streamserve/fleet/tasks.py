"""Background tasks of the fleet's runtime. Every failure is handled:

- `run_loop`: a loop. An exception is logged and the loop restarts; too many failures in a row are fatal.
- `spawn`: a task that runs once. An exception is fatal.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
MAX_FAILURES = 20
"""Failures of a loop within FAILURE_WINDOW seconds after which it is not restarted."""
FAILURE_WINDOW = 30.0

Work = Coroutine[object, object, None]


class TaskSupervisor:
    """Runs tasks in the current event loop, and calls `fatal` with unrecoverable errors."""

    def __init__(self, fatal: Callable[[Exception], None]) -> None:
        self._fatal = fatal
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Work) -> None:
        """Run a task once."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def run_loop(self, make: Callable[[], Work], name: str) -> None:
        """Run a loop; restart it when it fails."""
        self.spawn(self._restart_loop(make, name))

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restart_loop(self, make: Callable[[], Work], name: str) -> None:
        failures: deque[float] = deque(maxlen=MAX_FAILURES)
        while True:
            try:
                await make()
            except Exception:
                now = time.monotonic()
                if len(failures) == MAX_FAILURES and now - failures[0] < FAILURE_WINDOW:
                    raise
                failures.append(now)
                logger.exception("the fleet's task %r failed; restarting it", name)
            await asyncio.sleep(RETRY_SECONDS)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fatal(error)
