"""Reserve processors for a worker's threads, so that workers of the same user do not share any.

Each processor has a file; a lock on it is a reservation, which ends with the process. A worker that finds too
few free processors is not pinned: the operating system schedules it. A worker that fits on a NUMA node gets
all its processors there. Then its memory is there too, because its threads are the first to write it.
"""

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamserve.execution.backends.native.build import LOCK, locked
from streamserve.system.processors import Processors, usable_processors
from streamserve.system.user_folders import cache_folder


@dataclass(frozen=True)
class ReservedCores:
    """Processors that the user's other workers do not use, until `release` or the end of the process."""

    cpus: tuple[int, ...]
    handles: tuple[int, ...]

    def release(self) -> None:
        """Release the processors for other workers."""
        _close(self.handles)


def reserve_cores(
    count: int, folder: Path | None = None, usable: Processors | None = None
) -> ReservedCores | None:
    """Reserve `count` of the processors in `usable` (default: all that this process may use), on different
    cores and on one NUMA node if possible. Returns None if fewer are free."""
    folder = folder or cache_folder() / "cores"
    usable = usable or usable_processors()
    nodes = usable.by_node()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / LOCK):  # otherwise a node that another worker only tries would seem full
            for cpus in nodes if len(nodes) == 1 else [*nodes, usable.cpus]:
                reserved = _reserve(count, folder, cpus)
                if reserved is not None:
                    return reserved
    except OSError:
        pass  # the folder cannot be written: as if no processor were free
    return None


def _reserve(count: int, folder: Path, cpus: Iterable[int]) -> ReservedCores | None:
    """Reserve the first `count` free processors in `cpus`; reserve none and return None if fewer are free.
    Raises OSError."""
    reserved: list[int] = []
    handles: list[int] = []
    try:
        for number in cpus:
            handle = _lock(folder / str(number)) if len(reserved) < count else None
            if handle is not None:
                reserved.append(number)
                handles.append(handle)
    except OSError:
        _close(handles)
        raise
    if len(reserved) < count:
        _close(handles)
        return None
    return ReservedCores(tuple(reserved), tuple(handles))


def _lock(path: Path) -> int | None:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)
