"""Find the GGUF file of a model: its only file, or the first part of a split one."""

import re
from pathlib import Path

from streamserve.protocol.errors import CheckpointError

SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""File name of one part of a split model: the model's name, the part's number and the number of parts."""


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or the one in the folder `path`; for a split model, its first
    part. None for any other path, and for a folder with a config.json, which is in Hugging Face layout.

    Raises CheckpointError for a later part, for a folder with several models, and for a folder that cannot be
    listed."""
    if path.is_dir():
        try:
            return None if (path / "config.json").exists() else _in_folder(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix.lower() != SUFFIX or not path.is_file():
        return None
    part = PART.fullmatch(path.name)
    if part and int(part[2]) != 1:
        raise CheckpointError(f"{path}: give the first file, {part_name(part[1], 1, int(part[3]))}")
    return path


def _in_folder(folder: Path) -> Path | None:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == SUFFIX and file.is_file())
    parts = {file: PART.fullmatch(file.name) for file in files}
    first = [file for file, part in parts.items() if part is None or int(part[2]) == 1]
    if len(first) > 1:
        names = ", ".join(file.name for file in first[:8])
        raise CheckpointError(f"{folder}: holds several models, give the path of one: {names}")
    return first[0] if first else None


def part_name(name: str, number: int, count: int) -> str:
    """Return the file name of part `number` of `count`; the first part has number 1."""
    return f"{name}-{number:05}-of-{count:05}{SUFFIX}"
