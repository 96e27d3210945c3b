"""A file that an operator names is read, or refused in a bounded time and with little memory."""

import errno
import os
import threading
from pathlib import Path

import pytest

from streamserve.protocol import files
from streamserve.protocol.files import MAX_BYTES, read_file, read_regular_file


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.05)


def written(pipe: Path, content: bytes) -> threading.Thread:
    """Write to a pipe in another thread, once it is read."""
    thread = threading.Thread(target=pipe.write_bytes, args=(content,))
    thread.start()
    return thread


def test_files_are_read_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"", b"key\n", b"x" * (3 << 20)):
        file.write_bytes(content)
        assert read_file(file) == read_regular_file(str(file)) == content
    assert read_file(os.devnull) == b""


def test_a_pipe_is_read_until_its_writer_closes_it(tmp_path: Path) -> None:
    pipe, content = tmp_path / "pipe", b"abc\n" * 100_000
    os.mkfifo(pipe)
    thread = written(pipe, content)
    assert read_file(pipe, patient=True) == content
    thread.join()
    reading, writing = os.pipe()  # as in --api-key-file <(command)
    os.write(writing, b"key\n")
    os.close(writing)
    assert read_file(f"/dev/fd/{reading}") == b"key\n"
    os.close(reading)


def test_a_pipe_without_a_writer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nothing arrived from it within"):
        read_file(tmp_path / "pipe")


def test_what_has_no_end_or_gigabytes_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 30)
    for path in (large, Path("/dev/zero")):
        with pytest.raises(OSError, match=f"it has more than {MAX_BYTES} bytes") as error:
            read_file(path)
        assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(OSError, match="it has more than 3 bytes"):
        read_file(Path(__file__), 3)


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    for read in (read_file, read_regular_file):
        with pytest.raises(IsADirectoryError):
            read(tmp_path)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")


def test_a_file_that_is_read_several_times_is_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(OSError, match="it is a pipe, a device or a socket, not a file"):
            read_regular_file(path)
