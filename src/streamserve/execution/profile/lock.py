"""Exclusive measurement: a lock for one process of a user at a time, and the load by other processes.

The two workers of a stream pair, or two servers that start at once, would disturb each other's measurements.
The lock is the kernel's (flock), so it ends with the process that holds it.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOCK = "measuring.lock"
RETRY_SECONDS = 0.05
BUSY = 0.25
"""Share of our threads by which the cores that other processes use may exceed those we leave free, before a
measurement counts as disturbed."""


@contextmanager
def exclusive_measurement(folder: Path, wait: float) -> Iterator[bool]:
    """Hold the measurement lock in `folder`; yields whether it was acquired within `wait` seconds. The body
    runs in either case, also where no file can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _locked(handle, wait)
    finally:
        os.close(handle)


def _locked(handle: int, wait: float) -> bool:
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(RETRY_SECONDS)


class BackgroundLoad:
    """The processor time that other processes use from construction on. Not measured where the system does
    not report it."""

    def __init__(
        self,
        threads: int,
        read: "Callable[[], Usage | None] | None" = None,
        cores: int = os.cpu_count() or 1,
    ) -> None:
        self._threads, self._left = threads, max(cores - threads, 0)
        self._read = read or _usage
        self._before = self._read()

    @property
    def disturbs(self) -> bool:
        """Whether other processes used more cores than our threads leave free."""
        before, now = self._before, self._read()
        if now is None or before is None or now.time <= before.time:
            return False
        others = now.machine - before.machine - (now.own - before.own)
        return others / (now.time - before.time) > self._left + BUSY * self._threads


@dataclass(frozen=True)
class Usage:
    """A clock in seconds, and the processor seconds used until then: by the whole machine, and by this
    process."""

    time: float
    machine: float
    own: float


def _usage() -> Usage | None:
    """Return the current usage, as Linux reports it; None elsewhere."""
    try:
        numbers = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, interrupts, soft, stolen = (int(number) for number in numbers)
    except (OSError, ValueError):
        return None
    busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return Usage(time.monotonic(), busy, times.user + times.system)
