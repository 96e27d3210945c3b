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

FILES, BATCHES = ("file-1", "file-2"), ("batch_1", "batch_2")


def filled(path: Path) -> Path:
    """Return a folder with two files and two unfinished batches."""
    folder = BatchFolder(path, 1 << 20)
    for name in FILES:
        file = FileReply(id=name, bytes=3, created_at=1, filename="f", purpose="batch")
        folder.content(name).write_text("{}\n")
        folder.put_file(StoredFile(owner="me", file=file))
    for name in BATCHES:
        batch = BatchReply(
            id=name, endpoint="/v1/completions", input_file_id="file-1", completion_window="24h",
            status="in_progress", created_at=1, expires_at=2,
        )  # fmt: skip
        folder.put_batch(StoredBatch(owner="me", batch=batch, output=f"file-o{name}", error=f"file-e{name}"))
        folder.content(f"file-o{name}").write_text("answer\n")
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
@pytest.mark.parametrize("record", ["files/file-2.json", "batches/batch_2.json"])
def test_a_damaged_record_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record: str, damage: str
) -> None:
    path = filled(tmp_path)
    DAMAGE[damage](path / record)
    with caplog.at_level(logging.WARNING):
        folder = BatchFolder(path, 1 << 20)
    content = "file-2" if record.startswith("files") else "file-obatch_2"
    assert {*folder.files, *folder.batches} == {*FILES, *BATCHES} - {Path(record).stem}
    assert {f"{Path(record).name}{DAMAGED}", f"{content}.jsonl{DAMAGED}"} < names(path)
    assert folder.content("file-obatch_1").read_text() == "answer\n"
    warnings = [each.getMessage() for each in caplog.records]
    assert f"{path / record} is damaged and not used: it is now {Path(record).name}{DAMAGED}" in warnings[0]
    assert len(warnings) == 2
    folder.close()
    before = names(path)
    BatchFolder(path, 1 << 20).close()
    assert names(path) == before


def test_contents_without_a_record_go_where_no_record_is_damaged(tmp_path: Path) -> None:
    path = filled(tmp_path)
    (path / "files" / "file-3.jsonl").write_text("incomplete")
    (path / "files" / "file-3.part").write_text("incomplete")
    (path / "files" / "folder").mkdir()
    BatchFolder(path, 1 << 20).close()
    assert not {name for name in names(path) if name.startswith("file-3")}


def test_a_folder_in_the_place_of_which_there_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="Not a directory"):
        BatchFolder(tmp_path / "file" / "folder", 1)


@given(data=st.data())
def test_any_bytes_in_a_record_leave_a_folder_that_works(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = filled(tmp_path_factory.mktemp("batches"))
    record = path / data.draw(st.sampled_from(["files/file-2.json", "batches/batch_2.json"]))
    content = bytearray(record.read_bytes()[: data.draw(st.integers(0, record.stat().st_size))])
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    record.write_bytes(content)
    folder = BatchFolder(path, 1 << 20)
    kept = {*folder.files, *folder.batches}
    assert kept >= {"file-1", "batch_1"}
    assert (record.stem in kept) != Path(f"{record}{DAMAGED}").exists()
    for stored in folder.unfinished():
        assert msgspec.json.encode(stored)
    folder.close()
