"""One thread for work that takes more than a few milliseconds, so that the event loop does not block on it.

A single thread, as each thread that computes in Python delays the loop by the interpreter's switch interval.
Work runs in order of arrival; a request with many parts submits them one by one, so that other requests' work
can run in between.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from streamserve.text.template_limits import SlowRenderingError, quick

T = TypeVar("T")


class SideThread:
    """Runs functions one at a time. The thread is started on first use."""

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="api-side")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; return what it returns, or raise what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def run_if(self, large: bool, work: Callable[[], T]) -> T:
        """Like `run` if `large`; otherwise run `work` in the calling thread."""
        return await self.run(work) if large else work()

    async def render(self, large: bool, work: Callable[[], T]) -> T:
        """Like `run_if`, for `work` that renders a checkpoint's template. It is run again in the thread if
        that takes more than some milliseconds: even for a small request a template may compute for long."""
        if not large:
            try:
                with quick():
                    return work()
            except SlowRenderingError:
                pass
        return await self.run(work)
