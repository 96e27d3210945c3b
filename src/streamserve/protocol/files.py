"""Read the files that an operator names: settings, keys, certificates, texts.

Any path may be named, so reading has limits: a pipe that nothing writes to, a device without end, and a file
of gigabytes are refused.
"""

import errno
import os
import select
import stat
from pathlib import Path

MAX_BYTES = 16 << 20
"""Default limit of a file's size, in bytes. The file of a hundred thousand keys has some ten million."""

PIPE_SECONDS = 10.0
"""Seconds for which nothing may arrive from a pipe. A program that reads a key from a store takes a few."""

_PIECE = 1 << 20


def read_file(path: str | Path, max_bytes: int = MAX_BYTES, patient: bool = False) -> bytes:
    """Return the content of a file, or everything that a pipe or a device delivers until its end.

    Raises OSError, with the reason in `strerror`: the file cannot be read, has more than `max_bytes`, or is a
    pipe from which nothing arrives for `PIPE_SECONDS`. If `patient`, pipes have no such limit.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(handle).st_size > max_bytes:
            raise _too_large(path, max_bytes)
        return _read(handle, path, max_bytes, None if patient else PIPE_SECONDS)
    finally:
        os.close(handle)


def read_regular_file(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file that is read several times, or by several processes. Raises OSError as
    `read_file` does, and for a pipe or a device, which would be empty for the second reader."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file", str(path))
    return read_file(path, max_bytes)


def _read(handle: int, path: str | Path, max_bytes: int, seconds: float | None) -> bytes:
    arrived = select.poll()
    arrived.register(handle, select.POLLIN)
    content = bytearray()
    while arrived.poll(None if seconds is None else 1000 * seconds):
        try:
            piece = os.read(handle, _PIECE)
        except BlockingIOError:
            continue
        content += piece
        if len(content) > max_bytes:
            raise _too_large(path, max_bytes)
        if not piece:
            return bytes(content)
    raise OSError(errno.ETIMEDOUT, f"nothing arrived from it within {seconds:g} seconds", str(path))


def _too_large(path: str | Path, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
