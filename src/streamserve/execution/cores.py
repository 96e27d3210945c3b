"""Reserve processors for a worker's threads, so that workers of the same user do not share any.

A reservation is a lock on a file, one for each processor, which ends with the process. A worker that finds
too few free processors is not pinned: the operating system schedules it.
"""

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamserve.execution.native.build import cache_folder
from streamserve.protocol.processors import usable_processors


@dataclass(frozen=True)
class ReservedCores:
    """Processors reserved against the user's other workers, until `release` or the end of the process."""

    cpus: tuple[int, ...]
    handles: tuple[int, ...]

    def release(self) -> None:
        """Release the processors for other workers."""
        _close(self.handles)


def reserve_cores(count: int, folder: Path | None = None) -> ReservedCores | None:
    """Reserve `count` of the processors that this process may use, of different cores if possible; None if
    fewer are free."""
    folder = folder or cache_folder().parent / "cores"
    cpus: list[int] = []
    handles: list[int] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in usable_processors().cpus:
            handle = _lock(folder / str(number)) if len(cpus) < count else None
            if handle is not None:
                cpus.append(number)
                handles.append(handle)
    except OSError:
        pass  # a folder that cannot be written: treated as if no processor were free
    if len(cpus) < count:
        _close(handles)
        return None
    return ReservedCores(tuple(cpus), tuple(handles))


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
