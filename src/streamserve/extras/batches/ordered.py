"""Run requests concurrently, and take their results in order."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 4
"""Maximum number of started entries, as a multiple of the entries that may run at once: complete results wait
for earlier ones."""


async def run_in_order(
    entries: AsyncIterable[T],
    work: Callable[[T], Awaitable[R]],
    take: Callable[[R], None],
    limit: asyncio.Semaphore,
    width: int,
) -> None:
    """Run `work` on all `entries`, limited by `limit`, and pass the results to `take` in order.

    At most four times `width` entries are started before the first unfinished one is done. A failure cancels
    the other tasks, and so does cancelling this call.
    """
    pending: deque[asyncio.Task[R]] = deque()

    async def run(entry: T) -> R:
        async with limit:
            return await work(entry)

    try:
        async for entry in entries:
            pending.append(asyncio.create_task(run(entry)))
            await asyncio.sleep(0)  # reading and starting takes a while: let other tasks run in between
            while len(pending) >= _AHEAD * width or (pending and pending[0].done()):
                take(await pending[0])
                pending.popleft()
        while pending:
            take(await pending[0])
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
