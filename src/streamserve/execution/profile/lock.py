"""Measuring alone: one process of a user at a time, and how much others computed meanwhile.

Two halves of a pair, or two servers that start at once, would measure each other. The lock is of the kernel
(flock), so it ends with the process that holds it.
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
"""Cores that others may compute on beyond those left to them, by our threads, before figures are doubted."""


@contextmanager
def alone(folder: Path, wait: float) -> Iterator[bool]:
    """Hold the lock on measuring in `folder`; whether it was to be had within `wait` seconds. Without it, or
    where no file can be written, the caller goes on all the same."""
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


class Others:
    """What other processes compute on this machine from now on. Where the system does not tell, nothing."""

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
    def disturb(self) -> bool:
        """Whether they used more cores than our threads leave to them."""
        before, now = self._before, self._read()
        if now is None or before is None or now.time <= before.time:
            return False
        others = now.machine - before.machine - (now.own - before.own)
        return others / (now.time - before.time) > self._left + BUSY * self._threads


@dataclass(frozen=True)
class Usage:
    """Seconds of a clock, and processor seconds until then: of the whole machine, and of this process."""

    time: float
    machine: float
    own: float


def _usage() -> Usage | None:
    """The usage now, as Linux tells it."""
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, interrupts, soft, stolen = (int(number) for number in numbers)
    except (OSError, ValueError):
        return None
    busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return Usage(time.monotonic(), busy, times.user + times.system)
