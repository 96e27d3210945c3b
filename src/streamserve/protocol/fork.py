"""Messages between a process and its fork server, which starts programs by forking (workers/fork_server.py).

They go over a stream socket: four bytes of length (little endian), then msgpack. A request's file descriptors
come with its first byte.
"""

import fcntl
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

MAX_BYTES = 4 << 20
"""Maximum size of a message: an environment may have up to 2 MiB."""
MAX_DESCRIPTORS = 16
OWN_DESCRIPTORS = 4
"""Descriptors at the start of each request, without numbers: standard input, output and error, and the pidfd
of the requesting process."""

LATE_VARIABLES = frozenset({"TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"})
"""Environment variables that a program reads only after it was forked. Interpreter, loader and libraries may
read any other variable while they are imported."""
RESOURCE_LIMITS = 16
"""Number of resource limits that Linux has."""

Program = Literal["worker", "memory_plan"]
"""A program that can be forked: the module with this name in streamserve.workers; "worker" is the main
module."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start a program with these arguments. `command` is the command line that would start it: lists of
    processes show it. The program runs in `folder` with this environment, file mode mask and these
    processors. `descriptors` are the numbers that the further descriptors get in the program."""

    program: Program
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[bytes, bytes]
    folder: bytes
    umask: int
    processors: tuple[int, ...]
    descriptors: tuple[int, ...] = ()


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Ask for the exit status of a program that has ended."""

    pid: int


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The server can fork now. `libraries` are the native libraries that it has loaded: path, and identity of
    the file."""

    libraries: dict[str, tuple[int, ...]] = {}


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A program runs as `pid`. Its pidfd comes with this message."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The exit status of a program; negative: the signal that ended it; None: unknown."""

    status: int | None


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The program could not be forked."""

    reason: str


Request = Fork | Wait
Reply = Imported | Forked | Ended | Unable


def send(connection: socket.socket, message: Request | Reply, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message with file descriptors, which stay open here. Raises OSError."""
    data = msgspec.msgpack.encode(message)
    header = len(data).to_bytes(4, "little")
    if descriptors:
        socket.send_fds(connection, [header], descriptors)
        connection.sendall(data)
    else:
        connection.sendall(header + data)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message, not decoded, and its descriptors, which the caller must close. The message is
    empty if the other side has ended. Raises OSError."""
    header, descriptors, _, _ = socket.recv_fds(connection, 4, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    header += _read(connection, 4 - len(header)) if header else b""
    size = int.from_bytes(header, "little")
    data = _read(connection, size) if len(header) == 4 and size <= MAX_BYTES else b""
    return data, list(descriptors)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def above_streams(connection: socket.socket) -> socket.socket:
    """Return the socket with a descriptor above the standard streams' numbers, which it may have if one of
    them is closed."""
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
    users = os.geteuid(), os.getegid()
    return early, limits, groups, own_status("SigIgn"), os.getpriority(os.PRIO_PROCESS, 0), users


def file_mode_mask() -> int:
    """Return this process's umask."""
    return int(own_status("Umask") or "022", 8)


def own_status(name: str) -> str:
    """Return a field of /proc/self/status; "" if it is not there."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
