"""Determine the memory that is free for this process."""

import os
import resource
from pathlib import Path

from streamserve.protocol.errors import CheckpointError

MB = 10**6

SERVER_BYTES = 170 * MB
"""Minimum bytes of a server and its first worker without a model (torch 2.13, Linux x86-64)."""
FORKED_BYTES, STARTED_BYTES = 10 * MB, 100 * MB
"""Bytes of each further worker: if it shares its imports with the others (forked), and if not (started)."""
ADDRESS_BYTES = 1000 * MB
"""Bytes of addresses that a worker's libraries reserve: far more than they use."""


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can use without swapping: the least of the machine's available
    memory, the headroom of its control groups, and the rest of its address limit."""
    return max(0, min([_machine_bytes(proc), *_group_bytes(proc, groups), *_address_bytes(proc)]))


def check_processes(workers: int, forked: bool, free: int, addresses: int | None) -> None:
    """Raise CheckpointError unless the processes of a server fit in `free` bytes. Checked before any is
    started.

    - `workers`: the number of worker processes of all models.
    - `forked`: whether they share their imports.
    - `addresses`: each process's limit of addresses in bytes (`ulimit -v`); None without one.
    """
    if addresses is not None and addresses < ADDRESS_BYTES:
        raise CheckpointError(
            f"ulimit -v allows {addresses / MB:.0f} MB of addresses, and a worker's libraries need "
            f"{ADDRESS_BYTES / MB:.0f} MB besides its model and KV cache: raise this limit"
        )
    needed = SERVER_BYTES + (workers - 1) * (FORKED_BYTES if forked else STARTED_BYTES)
    if free < needed:
        raise CheckpointError(
            f"{free / MB:.0f} MB of memory are free, and the processes of a server with {workers} "
            f"worker{'s' if workers > 1 else ''} need {needed / MB:.0f} MB besides its model and KV cache: "
            "raise the limit of the control group, or start fewer workers"
        )


def address_limit() -> int | None:
    """Return the limit of this process's addresses in bytes (`ulimit -v`); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _address_bytes(proc: Path) -> list[int]:
    """Return the bytes that the limit of this process's addresses leaves; an empty list without a limit."""
    limit = address_limit()
    try:
        pages = int((proc / "self/statm").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return []
    return [] if limit is None else [limit - pages * resource.getpagesize()]


def _machine_bytes(proc: Path) -> int:
    available = _entry(proc / "meminfo", "MemAvailable:")
    if available is None:  # not Linux: assume half of the installed memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return available * 1024


def _group_bytes(proc: Path, groups: Path) -> list[int]:
    """Return the headroom of each control group of this process, from its group up to the mount: of version
    2, and of version 1, whose groups are mounted under `memory`."""
    headroom = [
        _group_headroom(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
        for group in _along(groups / "memory", _version_1_path(proc))
    ]
    path = _entry_text(proc / "self/cgroup", "0::")
    if path is not None:
        # Above memory.high nothing is killed, but the kernel slows all processes of the group down.
        headroom += [
            _group_headroom(group, limit, "memory.current")
            for group in _along(groups, path)
            for limit in ("memory.max", "memory.high")
        ]
    return [value for value in headroom if value is not None]


def _version_1_path(proc: Path) -> str:
    """Return the path of this process's memory control group of version 1; "/" if there is none."""
    try:
        lines = os.fsdecode((proc / "self/cgroup").read_bytes()).splitlines()
    except OSError:
        return "/"
    parts = (line.split(":", 2) for line in lines)
    return next((rest[2] for rest in parts if len(rest) == 3 and "memory" in rest[1].split(",")), "/")


def _along(mount: Path, path: str) -> list[Path]:
    """Return the control group of this path, and the groups above it up to the mount."""
    group = mount / path.lstrip("/")
    ancestors = [group, *group.parents]
    return ancestors[: ancestors.index(mount) + 1]


def _group_headroom(group: Path, limit: str, usage: str) -> int | None:
    """Return the limit minus the usage of a control group, in bytes. Inactive file pages do not count as
    used. None without a limit."""
    try:
        headroom = int((group / limit).read_text()) - int((group / usage).read_text())
    except (OSError, ValueError):
        return None  # no such group, or no limit ("max")
    stat = group / "memory.stat"  # version 1 counts the group alone, and in `total_` all groups below
    return headroom + (_entry(stat, "total_inactive_file ") or _entry(stat, "inactive_file ") or 0)


def _entry(path: Path, name: str) -> int | None:
    text = _entry_text(path, name)
    return None if text is None else int(text.split()[0])


def _entry_text(path: Path, name: str) -> str | None:
    """Return the rest of the first line that starts with `name`."""
    try:
        lines = os.fsdecode(path.read_bytes()).splitlines()
    except OSError:
        return None
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), None)
