"""What a forked process inherits and cannot change later."""

import fcntl
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

LATE_VARIABLES = frozenset({"TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"})
"""Environment variables that a program reads only after it was forked. Interpreter, loader and libraries may
read any other variable while they are imported."""
RESOURCE_LIMITS = 16
"""Number of resource limits that Linux has."""
STATUS = (
    "Uid", "Gid", "Groups", "SigIgn", "CapInh", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"
)  # fmt: skip
"""Fields of /proc/self/status that a child inherits: users, ignored signals, and what it may not do."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
"""The namespaces of a new child, in /proc/self/ns."""


def above_streams(connection: socket.socket) -> socket.socket:
    """Return the socket with a descriptor above the standard streams' numbers. If a standard stream was
    closed, a new socket gets the number of that stream."""
    if connection.fileno() > 2:
        return connection
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def identity(file: Path) -> tuple[int, ...]:
    """Return values that change when a file is replaced; empty if there is no file. The modification time is
    left out: uses of the library renew it."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size


def surroundings(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a new child process of this process inherits and cannot change later, or what libraries
    read while they are imported. A child forked from an earlier child has the earlier child's values."""
    early = {name: value for name, value in environment.items() if name not in LATE_VARIABLES}
    limits = tuple(resource.getrlimit(limit) for limit in range(RESOURCE_LIMITS))
    groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    status = tuple(own_status(name) for name in STATUS)
    spaces = tuple(identity(Path("/proc/self/ns", name)) for name in NAMESPACES)
    return early, limits, groups, status, spaces, os.getpriority(os.PRIO_PROCESS, 0)


def file_mode_mask() -> int:
    """Return this process's umask."""
    return int(own_status("Umask") or "022", 8)


def own_status(name: str) -> str:
    """Return a field of /proc/self/status; "" if it is not there."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
