"""The folder in which files and batches are kept, so that they survive a restart.

files/ID.json       a file's record; written last, so that a file without a record is incomplete
files/ID.jsonl      its content
batches/ID.json     a batch
*/ID.part           a record that was not written to its end
*.damaged           files that could not be used when a server started, left for the operator
lock                locked by the server that uses the folder

Only files with such names are read, renamed or removed: the operator may have other files there.
The subfolders are created so that only the server's user can read them: they hold prompts and answers.
"""

import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from streamserve.extras.batches.schemas import FINAL, StoredBatch, StoredFile
from streamserve.protocol.errors import RequestError

S = TypeVar("S", bound=msgspec.Struct)

_log = logging.getLogger(__name__)

MAX_FILES = 10_000
"""Maximum number of files, and maximum number of batches."""

MAX_RECORD_BYTES = 4 << 20
"""Maximum size of the record of a file or a batch, in bytes."""

DAMAGED = ".damaged"
"""Suffix of the names of files that are set aside."""


_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
"""The ids from `new_name`."""


class FolderError(OSError):
    """A folder that cannot be used. The message is one line for the operator."""


class BatchFolder:
    """Files and batches by id, oldest first. `held` is the size of all files in bytes, at most
    `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Read the folder, or create it; remove incomplete files that a crash left. Damaged files are set
        aside, each with a warning.

        Raises FolderError if the folder cannot be used, or if another server uses it.
        """
        self.max_bytes = max_bytes
        self.held = 0
        self._files_path, self._batches_path = path / "files", path / "batches"
        try:
            for folder in (self._files_path, self._batches_path):
                path.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
            # Opened for reading as well, so that a pipe of this name does not block.
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = os.fdopen(handle, "r+b", buffering=0)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(f"batch_folder {path}: another server uses it") from error
        except OSError as error:
            raise FolderError(f"batch_folder {path}: {error.strerror}") from error
        files, batches = _read_all(self._files_path, StoredFile), _read_all(self._batches_path, StoredBatch)
        self.files = {stored.file.id: stored for stored in files.records}
        self.batches = {stored.batch.id: stored for stored in batches.records}
        missing = self._set_aside_without_content()
        self._remove_incomplete(files.damaged or batches.damaged or missing)

    def close(self) -> None:
        """Let another server use the folder."""
        self._lock.close()

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content, which need not exist yet."""
        return self._files_path / f"{file_id}.jsonl"

    def file(self, file_id: str, owner: str, field: str | None = None) -> StoredFile:
        """Return a file of `owner`. Raises RequestError (404) about `field` if there is none."""
        stored = self.files.get(file_id)
        if stored is None or stored.owner != owner:
            raise RequestError(f"there is no file {file_id[:100]!r}", field=field, status=404)
        return stored

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return a batch of `owner`. Raises RequestError (404) if there is none."""
        stored = self.batches.get(batch_id)
        if stored is None or stored.owner != owner:
            raise RequestError(f"there is no batch {batch_id[:100]!r}", status=404)
        return stored

    def reserve(self, size: int) -> None:
        """Count `size` bytes that are about to be written. Raises RequestError (413) if they do not fit."""
        if self.held + size > self.max_bytes:
            raise RequestError(
                f"the files of all batches take {self.held} bytes, and {self.max_bytes} is the limit "
                "(max_batch_folder_bytes): delete some files",
                status=413,
            )
        self.held += size

    def release(self, size: int) -> None:
        """Subtract `size` bytes from the count."""
        self.held -= size

    def check_number(self) -> None:
        """Raise RequestError (413) if the number of files or batches has reached its limit."""
        if max(len(self.files), len(self.batches)) >= MAX_FILES:
            raise RequestError(
                f"there are {MAX_FILES} files or batches, which is the limit: delete some of them", status=413
            )

    def put_file(self, stored: StoredFile) -> None:
        """Store the record of a file whose content is written and counted."""
        _write(self._files_path / f"{stored.file.id}.json", stored)
        self.files[stored.file.id] = stored

    def put_batch(self, stored: StoredBatch) -> None:
        """Store the record of a batch, new or changed."""
        _write(self._batches_path / f"{stored.batch.id}.json", stored)
        self.batches[stored.batch.id] = stored

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Also delete the batches that have ended and have no other files left."""
        (self._files_path / f"{file_id}.json").unlink(missing_ok=True)
        self.discard(file_id)
        del self.files[file_id]
        for batch_id, stored in list(self.batches.items()):
            files = {stored.batch.input_file_id, stored.output, stored.error}
            if file_id in files and stored.batch.status in FINAL and not files & self.files.keys():
                (self._batches_path / f"{batch_id}.json").unlink(missing_ok=True)
                del self.batches[batch_id]

    def discard(self, file_id: str) -> None:
        """Remove the content of a file."""
        self.release(_size(self.content(file_id)))
        self.content(file_id).unlink(missing_ok=True)

    def unfinished(self) -> list[StoredBatch]:
        return [stored for stored in self.batches.values() if stored.batch.status not in FINAL]

    def _set_aside_without_content(self) -> bool:
        """Set aside the records of files whose content is not a file, and return whether there were any."""
        missing = [name for name in self.files if not self.content(name).is_file()]
        for name in missing:
            _set_aside(self._files_path / f"{name}.json", "its content is not there")
            del self.files[name]
        return bool(missing)

    def _remove_incomplete(self, damaged: bool) -> None:
        """Remove contents without a record, except the results of batches that go on, and count the others.
        If a record was `damaged`, contents without a record may belong to it: they are set aside."""
        growing = {name for stored in self.unfinished() for name in (stored.output, stored.error)}
        known = growing | self.files.keys()
        parts = [*self._files_path.glob("*.part"), *self._batches_path.glob("*.part")]
        for path in [*self._files_path.glob("*.jsonl"), *parts]:
            if not _ID.fullmatch(path.stem):
                continue
            has_record = path.suffix == ".jsonl" and path.stem in known
            if has_record and path.is_file():
                self.held += _size(path)
            elif path.suffix == ".jsonl" and (damaged or has_record):
                _set_aside(path, "it is not a file" if has_record else "its record may be damaged")
            elif not path.is_dir():
                path.unlink()


@contextmanager
def writing() -> Iterator[None]:
    """Raise RequestError (507) in place of OSError: the folder cannot be written, for example on a full
    disk."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"the batch folder cannot be written: {error.strerror}", status=507) from error


def new_name(kind: str) -> str:
    """Return a new id such as file-0123…"""
    return f"{kind}{secrets.token_hex(16)}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _write(path: Path, stored: msgspec.Struct) -> None:
    """Write a file as a whole: it is complete or absent, even if the process ends meanwhile."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(msgspec.json.encode(stored))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Records(Generic[S]):
    """The records of a folder, oldest first. `damaged`: whether there were records that could not be read."""

    records: list[S]
    damaged: bool


def _read_all(folder: Path, kind: type[S]) -> _Records[S]:
    """Return the records in the folder's JSON files; damaged files are set aside. Raises FolderError if a
    file cannot be read or set aside."""
    records = list[S]()
    paths = [path for path in folder.glob("*.json") if _ID.fullmatch(path.stem)]
    for path in paths:
        try:
            records.append(_read(path, kind))
        except ValueError as error:
            _set_aside(path, str(error))
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}") from error
    return _Records(sorted(records, key=_created), len(records) < len(paths))


def _read(path: Path, kind: type[S]) -> S:
    """Return a record. Raises ValueError if it is damaged, OSError if it cannot be read."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
        raise ValueError(f"it is not a file of at most {MAX_RECORD_BYTES} bytes")
    record = msgspec.json.decode(path.read_bytes(), type=kind)
    if _id(record) != path.stem:
        raise ValueError(f"it contains the id {_id(record)!r:.100}, which differs from the id in its name")
    return record


def _set_aside(path: Path, reason: str) -> None:
    """Rename a file so that it is not read again, and log that. Raises FolderError if that fails."""
    aside = path.with_name(path.name + DAMAGED)
    try:
        path.rename(aside)
    except OSError as error:
        raise FolderError(f"{path} is damaged and cannot be renamed: {error.strerror}") from error
    _log.warning("%s is damaged and not used: it is now %s (%s)", path, aside.name, reason)


def _id(stored: msgspec.Struct) -> str:
    if isinstance(stored, StoredFile):
        return stored.file.id
    assert isinstance(stored, StoredBatch)
    return stored.batch.id


def _created(stored: msgspec.Struct) -> int:
    if isinstance(stored, StoredFile):
        return stored.file.created_at
    assert isinstance(stored, StoredBatch)
    return stored.batch.created_at
