"""A damaged file in the batch folder is renamed and reported; the other files stay."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.extras.batches.folder import DAMAGED, MAX_RECORD_BYTES, BatchFolder, FolderError
from streamserve.extras.batches.schemas import BatchReply, FileReply, StoredBatch, StoredFile

FILES, BATCHES = (f"file-{'1' * 32}", f"file-{'2' * 32}"), (f"batch_{'1' * 32}", f"batch_{'2' * 32}")
RECORDS = [f"files/{FILES[1]}.json", f"batches/{BATCHES[1]}.json"]


def results(kind: str, batch: str) -> str:
    """Return the id of a file with results of a batch: its answers ("a") or its errors ("e")."""
    return f"file-{kind}{batch[-31:]}"


def filled(path: Path) -> Path:
    """Return a folder with two files and two unfinished batches."""
    folder = BatchFolder(path, 1 << 20)
    for name in FILES:
        file = FileReply(id=name, bytes=3, created_at=1, filename="f", purpose="batch")
        folder.content(name).write_text("{}\n")
        folder.put_file(StoredFile(owner="me", file=file))
    for name in BATCHES:
        batch = BatchReply(
            id=name, endpoint="/v1/completions", input_file_id=FILES[0], completion_window="24h",
            status="in_progress", created_at=1, expires_at=2,
        )  # fmt: skip
        folder.put_batch(
            StoredBatch(owner="me", batch=batch, output=results("a", name), error=results("e", name))
        )
        folder.content(results("a", name)).write_text("answer\n")
    folder.close()
    return path


def names(path: Path) -> set[str]:
    return {file.name for part in ("files", "batches") for file in (path / part).iterdir()}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, 9),
    "empty": lambda file: os.truncate(file, 0),
    "text": lambda file: file.write_text("hello"),
    "another type": lambda file: file.write_text("[]"),
    "the id of another file": lambda file: file.write_text(file.read_text().replace(file.stem, "../../x")),
    "endless": lambda file: os.truncate(file, MAX_RECORD_BYTES + 1),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("record", RECORDS)
def test_a_damaged_record_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record: str, damage: str
) -> None:
    path = filled(tmp_path)
    DAMAGE[damage](path / record)
    with caplog.at_level(logging.WARNING):
        folder = BatchFolder(path, 1 << 20)
    content = FILES[1] if record.startswith("files") else results("a", BATCHES[1])
    assert {*folder.files, *folder.batches} == {*FILES, *BATCHES} - {Path(record).stem}
    assert {f"{Path(record).name}{DAMAGED}", f"{content}.jsonl{DAMAGED}"} < names(path)
    assert folder.content(results("a", BATCHES[0])).read_text() == "answer\n"
    warnings = [each.getMessage() for each in caplog.records]
    assert f"{path / record} is damaged and not used: it is now {Path(record).name}{DAMAGED}" in warnings[0]
    assert len(warnings) == 2
    folder.close()
    before = names(path)
    BatchFolder(path, 1 << 20).close()
    assert names(path) == before


def test_contents_without_a_record_go_where_no_record_is_damaged(tmp_path: Path) -> None:
    path = filled(tmp_path)
    before = names(path)
    for part, name in (("files", "file-"), ("batches", "batch_")):
        (path / part / f"{name}{'3' * 32}.part").write_text("incomplete")
    (path / "files" / f"file-{'3' * 32}.jsonl").write_text("incomplete")
    BatchFolder(path, 1 << 20).close()
    assert names(path) == before


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """A folder of the operator may have subfolders of these names, with anything in them."""
    others = {"report.pdf", "requests.jsonl", "package.json", "file-1.jsonl", "notes.part", "file-1.json"}
    others |= {FILES[0], f"{FILES[0]}.txt", f"{FILES[0]}.jsonl.bak", f"{FILES[0]}.gz", f"{BATCHES[0]}.old"}
    for part in ("files", "batches"):
        (tmp_path / part).mkdir()
        for name in others:
            (tmp_path / part / name).write_text(name)
        (tmp_path / part / "folder.jsonl").mkdir()
    folder = BatchFolder(tmp_path, 1 << 20)
    assert (folder.files, folder.batches, folder.held) == ({}, {}, 0)
    folder.close()
    assert names(tmp_path) == others | {"folder.jsonl"}
    assert {
        (tmp_path / part / name).read_text() for part in ("files", "batches") for name in others
    } == others


CONTENTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("damage", CONTENTS)
def test_a_record_without_its_content_is_set_aside(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path)
    CONTENTS[damage](path / "files" / f"{FILES[1]}.jsonl")
    CONTENTS[damage](path / "files" / f"{results('a', BATCHES[1])}.jsonl")
    folder = BatchFolder(path, 1 << 20)
    assert (folder.files.keys(), folder.batches.keys()) == ({FILES[0]}, set(BATCHES))
    assert f"{FILES[1]}.json{DAMAGED}" in names(path)
    assert not folder.content(results("a", BATCHES[1])).exists()
    assert folder.held == len("{}\n") + len("answer\n")
    folder.close()


def test_a_pipe_in_the_place_of_the_lock_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    first = BatchFolder(tmp_path, 1)
    with pytest.raises(FolderError, match="another server uses it"):
        BatchFolder(tmp_path, 1)
    first.close()
    BatchFolder(tmp_path, 1).close()


def test_a_folder_in_the_place_of_which_there_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="Not a directory"):
        BatchFolder(tmp_path / "file" / "folder", 1)


@given(data=st.data())
def test_any_bytes_in_a_record_leave_a_folder_that_works(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = filled(tmp_path_factory.mktemp("batches"))
    record = path / data.draw(st.sampled_from(RECORDS))
    content = bytearray(record.read_bytes()[: data.draw(st.integers(0, record.stat().st_size))])
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    record.write_bytes(content)
    folder = BatchFolder(path, 1 << 20)
    kept = {*folder.files, *folder.batches}
    assert kept >= {FILES[0], BATCHES[0]}
    assert (record.stem in kept) != Path(f"{record}{DAMAGED}").exists()
    for stored in folder.unfinished():
        assert msgspec.json.encode(stored)
    folder.close()
