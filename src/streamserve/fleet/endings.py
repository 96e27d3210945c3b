"""How a worker's process ended, and whether the requests that it computed may be the cause. Whether the
kernel has killed a process for lack of memory meanwhile."""

import signal
from collections.abc import Iterator
from pathlib import Path

from streamserve.fleet.events import Ending

ASKED = frozenset(
    (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
)
"""Signals by which people and programs ask a process to end. No fault of a process raises them."""


def ending_of(status: int | None, out_of_memory: bool) -> Ending:
    """Return how a process ended, from its exit `status` (negative: the signal that ended it; None: unknown).
    `out_of_memory`: whether the kernel killed a process for lack of memory meanwhile."""
    if status is None or status == -signal.SIGKILL:
        return "fault" if out_of_memory else "unclear"
    return "outside" if -status in ASKED else "fault"


def status_in_words(status: int | None) -> str:
    """Return an exit status in words."""
    if status is None:
        return "an unknown status"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


OomKills = tuple[int, ...]
"""The kernel's counters in a fixed order. A counter only grows."""


def oom_kills(root: Path = Path("/")) -> OomKills:
    """Return the counters that can be read. `root` is the folder that contains /proc and /sys."""
    # A list first: tuple() of a generator raises SystemError if another thread lists all objects meanwhile.
    return tuple([count for file in _files(root) if (count := _count(file)) is not None])


def rose(earlier: OomKills, later: OomKills) -> bool:
    """Return whether the kernel has killed a process between two readings."""
    return len(earlier) == len(later) and any(
        before < now for before, now in zip(earlier, later, strict=True)
    )


def _files(root: Path) -> Iterator[Path]:
    """Yield the files with counters: of the machine, and of the control groups of versions 1 and 2. In a
    container, the paths of groups may be valid only outside, so the groups' root is read as well."""
    yield root / "proc/vmstat"
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from (groups / path.lstrip("/") / "memory.events", groups / "memory.events")
        elif "memory" in controllers.split(","):
            memory = groups / "memory"
            yield from (memory / path.lstrip("/") / "memory.oom_control", memory / "memory.oom_control")


def _count(file: Path) -> int | None:
    """Return the value of a file's line `oom_kill`; None if there is none."""
    for line in _text(file).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
