"""Manage the pages of memory-mapped files while a model is loaded: read them ahead from the disk, and release
them when they have been packed, so that the process does not hold the file in addition to its weights."""

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

PAGE = mmap.PAGESIZE
MAPS = Path("/proc/self/maps")


def read_ahead(address: int, size: int) -> None:
    """Start reading the pages of `size` bytes of a mapped file, at `address`, from the disk. Returns when
    most of the reads are queued; other threads can run meanwhile."""
    begin = address // PAGE * PAGE
    _libc().madvise(begin, address + size - begin, mmap.MADV_WILLNEED)


def release(files: Iterable[Path]) -> None:
    """Drop the pages of memory-mapped files from this process, which must not have modified them. They stay
    in the system's page cache while there is memory, and come back when they are read."""
    names = {str(path.resolve()) for path in files}
    for begin, end, name in _mappings():
        if name in names:
            _libc().madvise(begin, end - begin, mmap.MADV_DONTNEED)


def _mappings() -> Iterable[tuple[int, int, str]]:
    """Yield begin, end and file name of this process's mappings of files; nothing without /proc."""
    try:
        lines = os.fsdecode(MAPS.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith("/"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield begin, end, name


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
