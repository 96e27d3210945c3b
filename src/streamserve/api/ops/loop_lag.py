"""How late the event loop runs what is due: while a callback computes, every request waits."""

import asyncio
import time
from collections.abc import Callable

SECONDS = 0.1
"""Time between two measurements. Longer pauses count once, with their length."""


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Pass to `observe`, again and again, by how many seconds the event loop was late, until cancelled."""
    while True:
        due = time.perf_counter() + SECONDS
        await asyncio.sleep(SECONDS)
        observe(max(0.0, time.perf_counter() - due))
