"""Counts of the processes that the kernel has killed for lack of memory, in this process's control groups and
on the whole machine."""

from collections.abc import Iterator
from pathlib import Path

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
