"""The private folder of a server's sockets. A lock shows whether its owner still runs, however it ended:

    $TMPDIR/streamserve-XXXXXXXX/   lock      locked (flock) by the owner for as long as it lives
                                    control   the socket that its workers connect to

A dead owner's folder is removed by its workers when they notice the death, or by the next start in the same
base folder.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "streamserve-"
LOCK = "lock"
EMPTY_SECONDS = 60.0
"""Age, in seconds, from which a folder without a lock is stale: its owner died within microseconds of
creating it."""

MAX_BASE_BYTES = 78
"""Maximum bytes of the path of the base folder: a socket's path has at most 107 bytes, 29 of them below the
base folder."""

IPC = "ipc://"


@dataclass(frozen=True)
class RuntimeFolder:
    """A runtime folder of this process at `path`. `handle` is its lock, which is released when this process
    ends."""

    path: Path
    handle: int

    def remove(self) -> None:
        """Remove the folder with its contents, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.handle)


def make_runtime_folder(base: Path | None = None) -> RuntimeFolder:
    """Create a locked folder in `base`, by default `socket_base()`, after removing folders of dead owners.
    Raises OSError if that is not possible."""
    base = base or socket_base()
    sweep(base)
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        handle = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(handle) and (path / LOCK).exists():
            return RuntimeFolder(path, handle)
        os.close(handle)  # another process's sweep removed the folder before it was locked


def socket_base() -> Path:
    """Return the base folder for runtime folders: the temporary folder, unless the paths of sockets in it
    would be longer than the kernel allows; then another folder for temporary files."""
    folders = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]
    short = (f for f in folders if os.path.isabs(f) and len(os.fsencode(f)) <= MAX_BASE_BYTES)
    usable = (folder for folder in short if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK))
    return Path(next(usable, folders[0]))


def sweep(base: Path) -> list[Path]:
    """Remove the folders in `base` whose owners are dead; return them."""
    return [path for path in base.glob(f"{PREFIX}*") if remove_if_dead(path)]


def remove_if_dead(path: Path) -> bool:
    """Remove a runtime folder if its lock is free; return whether it was removed. Folders of other users
    stay, and so do folders without a lock that are not empty."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _remove_if_empty(path)
    except OSError:
        return False
    try:
        if not _lock(handle):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(handle)


def remove_own() -> None:
    """Remove the runtime folders whose locks this process has open. Called when the process is about to end;
    their owners in this process need not be known."""
    locks = list[Path]()
    with contextlib.suppress(FileNotFoundError):  # without /proc
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                locks.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    for lock in locks:
        if lock.name == LOCK and lock.parent.name.startswith(PREFIX):
            shutil.rmtree(lock.parent, ignore_errors=True)


def folder_of(endpoint: str) -> Path | None:
    """Return the runtime folder that contains the socket at `endpoint`, or None."""
    folder = Path(endpoint.removeprefix(IPC)).parent
    return folder if endpoint.startswith(IPC) and folder.name.startswith(PREFIX) else None


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_empty(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > EMPTY_SECONDS:
            path.rmdir()
            return True
    return False
