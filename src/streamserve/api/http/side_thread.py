"""One thread for work that takes more than a few milliseconds, so that the event loop is not blocked.

There is only one, because each thread that computes in Python delays the loop by the interpreter's switch
interval. Work runs in order of arrival. A request with many parts submits them one by one, so that other
requests' work runs in between.
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
        """Run `work` in the thread; return its result, or raise its error."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def run_if(self, large: bool, work: Callable[[], T]) -> T:
        """Run `work` in the thread if `large`, else in the calling thread."""
        return await self.run(work) if large else work()

    async def render(self, large: bool, work: Callable[[], T]) -> T:
        """Run `work`, which renders a checkpoint's template, as `run_if` does. Even for a small request a
        template may compute for long: rendering that takes more than some milliseconds is started again in
        the thread."""
        if not large:
            try:
                with quick():
                    return work()
            except SlowRenderingError:
                pass
        return await self.run(work)
