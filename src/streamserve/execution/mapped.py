"""The pages of memory-mapped files while a model is loaded: read from the disk before they are needed, and
released when they have been packed, so that a process never has the file in memory besides its weights."""

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

PAGE = mmap.PAGESIZE
MAPS = Path("/proc/self/maps")


def read_ahead(address: int, size: int) -> None:
    """Read the pages of `size` bytes of a mapped file into memory. Returns when the disk has most of them to
    read; other threads run meanwhile."""
    begin = address // PAGE * PAGE
    _libc().madvise(begin, address + size - begin, mmap.MADV_WILLNEED)


def release(files: Iterable[Path]) -> None:
    """Take the pages of mapped files, which nothing may have changed in memory, from this process. They stay
    in the system's cache while there is memory for them, and are mapped again when they are read."""
    names = {str(path.resolve()) for path in files}
    for begin, end, name in _mappings():
        if name in names:
            _libc().madvise(begin, end - begin, mmap.MADV_DONTNEED)


def _mappings() -> Iterable[tuple[int, int, str]]:
    """Yield begin, end and file of this process's mappings of files; none where they are unknown."""
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
