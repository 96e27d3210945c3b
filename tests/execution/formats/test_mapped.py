"""Pages of mapped files are loaded into memory before they are read, and leave the process once released."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from streamserve.execution.formats.mapped import read_ahead, release

SIZE = 16 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model file"
    file.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return file


def mapped_bytes() -> int:
    """Return the bytes of mapped files that are in this process's memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


def test_released_pages_leave_the_process_and_come_back(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    mapped, other = np.memmap(path, np.uint8, mode="r"), tmp_path / "other"
    total = int(mapped.sum())
    read = mapped_bytes()
    other.write_bytes(b"not mapped")
    release([other, tmp_path / "none"])
    assert mapped_bytes() > read - SIZE / 2
    release([link])
    assert mapped_bytes() < read - SIZE / 2
    assert int(mapped.sum()) == total


def cached(file: int) -> bool:
    """Return whether the middle of the file can be read without the disk."""
    try:
        return os.preadv(file, [bytearray(4096)], SIZE // 2, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def test_what_is_read_ahead_is_in_memory(path: Path) -> None:
    mapped = np.memmap(path, np.uint8, mode="r")
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, SIZE, os.POSIX_FADV_DONTNEED)
        if cached(file):
            pytest.skip("this file system keeps all files in memory")
        part = mapped[SIZE // 4 + 1 : -SIZE // 4]
        read_ahead(part.ctypes.data, part.nbytes)
        limit = time.monotonic() + 20
        while not cached(file) and time.monotonic() < limit:
            time.sleep(0.01)
        assert cached(file)
    finally:
        os.close(file)
