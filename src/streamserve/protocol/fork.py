"""Messages between a process and its fork server, which starts programs by forking (workers/fork_server.py).

They go over a stream socket: four bytes of length (little endian), then msgpack. A request's file descriptors
come with its first byte.
"""

import socket
from typing import Literal

import msgspec

MAX_BYTES = 4 << 20
"""Maximum size of a message: an environment may have up to 2 MiB."""
MAX_DESCRIPTORS = 16
OWN_DESCRIPTORS = 4
"""Descriptors at the start of each request, without numbers: standard input, output and error, and the pidfd
of the requesting process."""

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


class ProgramEnded(msgspec.Struct, frozen=True, tag=True):
    """The exit status of a program; negative: the signal that ended it; None: unknown."""

    status: int | None


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The program could not be forked."""

    reason: str


Request = Fork | Wait
Reply = Imported | Forked | ProgramEnded | Unable


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
