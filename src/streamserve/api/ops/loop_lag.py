"""Measures how late the event loop runs callbacks that are due: while one computes, every request waits."""

import asyncio
import time
from collections.abc import Callable

SECONDS = 0.1
"""Seconds between two measurements. A longer pause counts once, with its length."""


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Repeatedly pass the seconds by which the event loop was late to `observe`, until cancelled."""
    while True:
        due = time.perf_counter() + SECONDS
        await asyncio.sleep(SECONDS)
        observe(max(0.0, time.perf_counter() - due))
