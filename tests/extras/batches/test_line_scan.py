"""The scan finds the lines of any file as `readline` does, with bounded work in each call."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.extras.batches import lines
from streamserve.extras.batches.lines import LineError, LinePosition, LineScan, complete_lines, places

MAX_BYTES = 30
CONTENTS = st.lists(st.sampled_from([b"\n", b" ", b"\r", b"a", b"\x00", b"bc ", b"x" * 12]), max_size=60).map(
    b"".join
)


def by_readline(path: Path) -> tuple[list[LinePosition], int | None]:
    """Return the positions of the lines by `readline`, and the line number at which the file is refused, if
    any."""
    found, offset = [], 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                if len(text) > MAX_BYTES:
                    return found, number
                found.append(LinePosition(number, offset, len(text)))
            offset += len(text)
    return found, None


@given(content=CONTENTS, piece=st.integers(1, 20))
def test_lines_are_those_of_readline(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, piece: int
) -> None:
    path = tmp_path_factory.mktemp("lines", numbered=True) / "file"
    path.write_bytes(content)
    found: list[LinePosition] = []
    refused = None
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(lines, "PIECE", piece)
        try:
            for place in places(file, MAX_BYTES):
                found.append(place)
        except LineError as error:
            refused = error.line
    assert (found, refused) == by_readline(path)


@given(content=CONTENTS, piece=st.integers(1, 20))
def test_complete_lines_stay(tmp_path_factory: pytest.TempPathFactory, content: bytes, piece: int) -> None:
    path = tmp_path_factory.mktemp("lines", numbered=True) / "file"
    path.write_bytes(content)
    complete = content[: content.rfind(b"\n") + 1]
    read: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "PIECE", piece)
        assert complete_lines(path, read.append) == complete.count(b"\n")
    assert b"".join(read) == path.read_bytes() == complete


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: collecting all objects of a test session takes a second of the thread that
    triggers it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("content", [b"\n", b" \n", b" ", b"\r", b"a\n"])
def test_a_piece_is_bounded_work(tmp_path: Path, content: bytes) -> None:
    """Each call takes a few milliseconds of processor time at most, however many blank lines a file has."""
    path = tmp_path / "file"
    path.write_bytes(content * (2 * lines.PIECE))
    with path.open("rb") as file:
        scan = LineScan(file, 1 << 20)
        calls = longest = 0.0
        while not scan.ended:
            start = time.thread_time()
            found = scan.next()
            calls, longest = calls + 1, max(longest, time.thread_time() - start)
            assert len(found) <= lines.PIECE // 2
    assert calls >= 2 * len(content)
    assert longest < 0.2, "of processor time: one call for the whole file took seconds"
