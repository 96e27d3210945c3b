"""Memory for weights that the workers of one host share: written once, then sealed, and mapped by all.

    memfd of the server ── inherited ──▶ first worker:  lock, write tensors and their index, seal
                                    └──▶ other workers: wait for the lock, find it sealed, map it read-only

The kernel lets no process change a sealed file. Only a complete file is sealed: a worker that gets the lock
and finds no seal starts over. The lock ends with its process, and the memory with the last process that has
the file open.
"""

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from math import prod
from struct import Struct

import msgspec
import torch
from torch import Tensor

HEADER = Struct("<QQ")
"""Offset and size of the index in bytes, at the file's beginning."""
HEADER_BYTES = 4096
"""Bytes that are reserved for the header."""
LARGE_PAGE = 2 << 20
ALIGNMENT = 4096
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAP_FIXED, MAP_NORESERVE, MADV_COLLAPSE = 0x10, 0x4000, 25


class ArenaTensor(msgspec.Struct, frozen=True):
    """A tensor in an arena, `offset` bytes after the arena's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Region:
    """Addresses for up to `size` bytes of a file. They are released with the last tensor in them."""

    def __init__(self, size: int) -> None:
        """Reserve the addresses. Raises OSError if that fails."""
        length = size + LARGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        begin = _map(0, length, 0, flags, -1, 0)
        self.size = size
        self.address = -(-begin // LARGE_PAGE) * LARGE_PAGE
        array = (ctypes.c_uint8 * size).from_address(self.address)
        weakref.finalize(array, _libc().munmap, begin, length)
        self._bytes = torch.frombuffer(array, dtype=torch.uint8)

    def map(self, descriptor: int, begin: int, end: int, writable: bool = False) -> None:
        """Map bytes `begin` to `end` of a file, in place of an earlier mapping of them."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(self.address + begin, end - begin, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor, begin)

    def memory(self, offset: int, size: int) -> Tensor:
        """Return the `size` bytes from `offset` on, as uint8."""
        return self._bytes[offset : offset + size]

    def tensor(self, stored: ArenaTensor) -> Tensor:
        """Return a stored tensor as a view of the memory. It must not be written."""
        dtype: torch.dtype = getattr(torch, stored.dtype)
        content = self.memory(stored.offset, prod(stored.shape) * dtype.itemsize)
        return content.view(dtype).view(stored.shape)

    def offset(self, tensor: Tensor) -> int | None:
        """Return a tensor's offset in the region; None if it is not in the region."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


class WeightArena:
    """The shared memory of one model's weights, in the inherited file `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the file takes now."""
        return os.fstat(self._descriptor).st_blocks * 512

    @property
    def sealed(self) -> bool:
        """Whether the file is complete."""
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, which one process can have at a time. As a POSIX lock, it ends when the process
        closes any descriptor of the file."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def open_read_only(self) -> int:
        """Return a read-only descriptor. Its mappings do not prevent the seal against writing."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def index(self) -> bytes:
        """Return the index of a sealed arena."""
        offset, size = HEADER.unpack(os.pread(self._descriptor, HEADER.size, 0))
        return os.pread(self._descriptor, size, offset)

    def map(self) -> Region:
        """Return a mapping of the sealed arena."""
        size = os.fstat(self._descriptor).st_size
        region = Region(size)
        reader = self.open_read_only()
        try:
            region.map(reader, 0, size)
        finally:
            os.close(reader)
        return region

    def write(self, limit: int) -> "ArenaWriter":
        """Return a writer of up to about `limit` bytes. It discards the incomplete content of an earlier
        process."""
        os.ftruncate(self._descriptor, 0)
        region = Region(-(-limit // LARGE_PAGE) * LARGE_PAGE)
        return ArenaWriter(self._descriptor, self.open_read_only(), region)


class ArenaWriter:
    """Writes an arena, as a context manager. Written tensors can be read at once. Without `seal`, the content
    is discarded at the end."""

    def __init__(self, descriptor: int, reader: int, region: Region) -> None:
        self._descriptor, self._reader, self._region = descriptor, reader, region
        self._size, self._end, self._sealed = 0, HEADER_BYTES, False  # size: allocated bytes; end: used ones

    def __enter__(self) -> "ArenaWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._sealed:
            os.ftruncate(self._descriptor, 0)
        os.close(self._reader)  # closing a descriptor releases the process's lock of the file

    def memory(self, size: int) -> Tensor:
        """Allocate and return `size` bytes, which are zero. Raises OSError if there is no memory."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._grow(offset + size)
        self._end = offset + size
        return self._region.memory(offset, size)

    def tensor(self, tensor: Tensor) -> ArenaTensor:
        """Write a tensor, unless it is in the arena already, and return its index entry. Raises OSError if
        there is no memory."""
        name = str(tensor.dtype).removeprefix("torch.")
        offset = self._region.offset(tensor)
        if offset is None:
            content = tensor.contiguous().view(-1).view(torch.uint8)
            memory = self.memory(len(content))
            memory.copy_(content)
            offset = memory.data_ptr() - self._region.address
        return ArenaTensor(name, tuple(tensor.shape), offset)

    def read(self, stored: ArenaTensor) -> Tensor:
        """Return a written tensor as a view of the arena."""
        return self._region.tensor(stored)

    def seal(self, index: bytes) -> None:
        """Write the index, and seal the file."""
        stored = self.tensor(torch.frombuffer(bytearray(index), dtype=torch.uint8))
        os.pwrite(self._descriptor, HEADER.pack(stored.offset, len(index)), 0)
        self._region.map(self._reader, 0, self._size)  # a file with writable mappings cannot be sealed
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        self._sealed = True

    def _grow(self, end: int) -> None:
        """Allocate memory for at least `end` bytes of the file, on large pages if the kernel has some. Once
        it is allocated, writes to it cannot fail."""
        begin, end = self._size, -(-end // LARGE_PAGE) * LARGE_PAGE
        if end <= begin:
            return
        if end > self._region.size:
            raise OSError(f"the packed weights need more than the {self._region.size} bytes planned for them")
        os.ftruncate(self._descriptor, end)
        self._region.map(self._descriptor, begin, end, writable=True)
        for page in range(begin, end, LARGE_PAGE):  # MADV_COLLAPSE needs at least one present page in each
            os.pwrite(self._descriptor, b"\0", page + LARGE_PAGE - 1)
        if _libc().madvise(self._region.address + begin, end - begin, MADV_COLLAPSE):
            os.posix_fallocate(self._descriptor, begin, end - begin)
        self._size = end


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    return library


def _map(address: int, size: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    mapped: int = _libc().mmap(address, size, protection, flags, descriptor, offset)
    if mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"{size} bytes cannot be mapped: {os.strerror(error)}")
    return mapped
