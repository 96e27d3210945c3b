"""Exclusive measurement: a lock that one process of a user can have at a time, and the load by other
processes.

Without the lock, the two workers of a stream pair, or two servers that start at once, would disturb each
other's measurements. It is the kernel's (flock), so it ends with its process.
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
"""A measurement counts as disturbed if other processes use more cores than this process leaves free, by more
than this share of its threads."""


@contextmanager
def exclusive_measurement(folder: Path, wait: float) -> Iterator[bool]:
    """Hold the measurement lock in `folder`; yields whether it was acquired within `wait` seconds. The body
    runs in either case, even if the lock's file cannot be written."""
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
    """The processor time that other processes use from construction on; unknown if the system does not report
    it."""

    def __init__(
        self,
        threads: int,
        read: "Callable[[], ProcessorUsage | None] | None" = None,
        cores: int = os.cpu_count() or 1,
    ) -> None:
        self._threads, self._left = threads, max(cores - threads, 0)
        self._read = read or _usage
        self._before = self._read()

    @property
    def disturbs(self) -> bool:
        """Whether other processes have used more cores than this process's threads leave free (BUSY). False
        if that is unknown."""
        before, now = self._before, self._read()
        if now is None or before is None or now.time <= before.time:
            return False
        others = now.machine - before.machine - (now.own - before.own)
        return others / (now.time - before.time) > self._left + BUSY * self._threads


@dataclass(frozen=True)
class ProcessorUsage:
    """The processor seconds used until a clock's `time` in seconds: by the whole machine, and by this process
    (`own`)."""

    time: float
    machine: float
    own: float


def _usage() -> ProcessorUsage | None:
    """Return the present usage reported by Linux; None on other systems."""
    try:
        numbers = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, interrupts, soft, stolen = (int(number) for number in numbers)
    except (OSError, ValueError):
        return None
    busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return ProcessorUsage(time.monotonic(), busy, times.user + times.system)
