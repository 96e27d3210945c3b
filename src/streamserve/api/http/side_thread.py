"""One thread for work that takes more than a few milliseconds, so that the event loop does not wait for it.

One, not many: each thread that computes in Python delays the loop by the interpreter's switch interval. Work
is done in order of arrival; a request with many parts gives them one by one, so that others come in between.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


class SideThread:
    """Runs functions, one after the other. The thread is started with the first."""

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="api-side")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def run_if(self, large: bool, work: Callable[[], T]) -> T:
        """The same; what is not `large` is done here and now."""
        return await self.run(work) if large else work()
