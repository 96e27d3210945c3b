"""Folders that tests make from equal arguments are made once, for all test processes and later runs.

Each entry is one tar file, named by the hash of what it was made from. It is written under a temporary name
and renamed, so that a process finds a whole entry or none; entries may be removed at any time. Callers get
copies of the files, which they may change.
"""

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parent.parent / "build" / "test-checkpoints"
MAX_BYTES = 512 << 20
"""Maximum size of all entries. Beyond it, the least recently used entries are removed."""
LARGE = 16
"""An entry larger than this share of the cache is not stored: it would evict many others."""
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")


def make_once(
    folder: Path,
    source: Path,
    arguments: list[Any],
    make: Callable[[Path], None],
    cache: Path = CACHE,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Fill `folder` with what `make` writes to an empty folder.

    Args:
        source: the file that defines `make`; what older versions of it made is not used.
        arguments: all that the result depends on besides `source` and LIBRARIES, as JSON can represent it.
    """
    entry = cache / f"{entry_key(source, arguments)}.tar"
    if not _unpack(entry, folder):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            made, packed = Path(temporary, "made"), Path(temporary, "packed")
            made.mkdir()
            make(made)
            size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
            if size <= max_bytes // LARGE:
                with tarfile.open(packed, "w") as tar:
                    tar.add(made, ".")
                packed.replace(entry)
            shutil.copytree(made, folder, copy_function=shutil.move, dirs_exist_ok=True)
        remove_oldest(cache, max_bytes)


def entry_key(source: Path, arguments: list[Any]) -> str:
    """Return the hash of the arguments, of the maker's source and of the versions of LIBRARIES."""
    digest = hashlib.sha256(source.read_bytes())
    versions = {name: version(name) for name in LIBRARIES}
    digest.update(json.dumps([versions, arguments], sort_keys=True).encode())
    return digest.hexdigest()[:32]


def remove_oldest(cache: Path, max_bytes: int) -> None:
    """Remove the entries that were used longest ago until all together have at most `max_bytes`."""
    entries = []
    for path in cache.glob("*.tar"):
        try:
            entries.append((path.stat(), path))
        except FileNotFoundError:  # another process has removed it
            continue
    size = sum(stat.st_size for stat, _ in entries)
    for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if size <= max_bytes:
            break
        path.unlink(missing_ok=True)
        size -= stat.st_size


def _unpack(packed: Path, folder: Path) -> bool:
    """Write the files of an entry to `folder`, with the current time; return whether the entry exists."""
    try:
        file = packed.open("rb")
    except FileNotFoundError:
        return False
    with file, tarfile.open(fileobj=file) as tar:
        os.utime(file.fileno())  # marks it as used now
        folder.mkdir(parents=True, exist_ok=True)
        for member in tar:
            target = folder / member.name
            if member.isdir():
                target.mkdir(exist_ok=True)
            else:
                content = tar.extractfile(member)
                assert content is not None, f"{member.name} is neither a file nor a folder"
                target.write_bytes(content.read())
    return True
