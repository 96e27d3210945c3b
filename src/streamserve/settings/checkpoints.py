"""Locates a model: a packaged one by name, a folder, a GGUF file, or a repository of the Hugging Face hub."""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from streamserve import embedded
from streamserve.gguf.paths import SUFFIX, gguf_file
from streamserve.hub.cache import cached_path
from streamserve.hub.download import download
from streamserve.hub.errors import Unreachable
from streamserve.hub.names import HubName, parse_hub_name
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.tensor_header import MAX_POINTER_BYTES, check_lfs_pointer

TOKENIZER = "tokenizer.json"
EMBEDDED = ("embedded", "embedded-draft")
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
WEIGHT_SUFFIXES = (".safetensors", SUFFIX)
MAX_TEXT_BYTES = 256 << 20
_MAX_NAME = 64


def locate(model: str) -> Path:
    """Return the folder of `model`, or its GGUF file.

    A hub name (`owner/name`, for GGUF repositories `owner/name:Q4_K_M`, optionally with `@revision`) is
    downloaded unless it is in the hub's cache. Raises CheckpointError if there is no such model.
    """
    if model in EMBEDDED:
        return embedded.path(model)
    if not model:
        raise CheckpointError("the name is empty: give a checkpoint folder, a .gguf file or a hub name")
    path = expanded(model)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it may be a name on the hub
    except OSError as error:
        raise CheckpointError(f"{model:.200} cannot be read: {error.strerror}") from error
    file = gguf_file(path)
    if file or path.is_dir():
        refuse_odd_files([file] if file else sorted([*path.iterdir(), *_in_subfolders(path)]))
        return file or path
    if path.exists():
        raise CheckpointError(
            f"{model} is a file: give the folder that contains its config.json, or a .gguf file"
        )
    name = parse_hub_name(model)
    if name is None or (path.suffix == SUFFIX and not name.quantization):
        kind = "file" if path.suffix == SUFFIX else "folder"
        similar = get_close_matches(model[:_MAX_NAME], EMBEDDED, n=1)
        meant = f"did you mean {similar[0]}? Or " if similar else ""
        raise CheckpointError(
            f"there is no {kind} {model}: {meant}give a checkpoint folder, a .gguf file, a hub name such as "
            f"owner/model or owner/model:Q4_K_M, or one of: {', '.join(EMBEDDED)}"
        )
    return _from_hub(name)


def expanded(model: str) -> Path:
    """Return the path of a model, in which ~ is the user's home. Without a home, ~ stays, so that errors name
    what was given."""
    return Path(os.path.expanduser(model))


def _in_subfolders(path: Path) -> Iterator[Path]:
    """Yield the files below subfolders of a checkpoint that may be read: named chat templates, and settings
    of the modules of an embedding model."""
    for pattern in ("*/*.jinja", "*/config.json"):
        with contextlib.suppress(OSError):  # code that needs the folder reports the error
            yield from path.glob(pattern)


def refuse_odd_files(files: Iterable[Path]) -> None:
    """Raise CheckpointError if reading one of a checkpoint's `files` would not end (a pipe, a device), if a
    file of settings or a vocabulary is far too large, or if a file is a Git LFS pointer. Other files are not
    read."""
    for file in files:
        if file.suffix not in (*TEXT_SUFFIXES, *WEIGHT_SUFFIXES):
            continue
        try:
            status = file.stat()
        except OSError:  # code that needs the file reports the error
            continue
        is_empty = stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or is_empty):
            raise CheckpointError(f"{file} is not a file, but a pipe, a device or a socket: remove it")
        if file.suffix in TEXT_SUFFIXES and status.st_size > MAX_TEXT_BYTES:
            raise CheckpointError(f"{file} has {status.st_size} bytes: at most {MAX_TEXT_BYTES} are read")
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_POINTER_BYTES:
            with contextlib.suppress(OSError):
                check_lfs_pointer(file, file.read_bytes())


def root_name(model: str, path: str) -> str:
    """Return the location from which the tokenizer of `model` can be loaded: its hub name, else the folder or
    file `path`."""
    name = parse_hub_name(model)
    local = name is None or expanded(model).exists()
    return path if local or name is None else name.repo


def packaged_draft(target: Path) -> Path | None:
    """Return the packaged draft model, if it fits the checkpoint `target`.

    The packaged target, and every model inflated from it, has a byte-identical tokenizer. Return None for the
    draft model itself, and for every other model.
    """
    try:
        folder = embedded.path("embedded-draft")
        same = (target / TOKENIZER).read_bytes() == (folder / TOKENIZER).read_bytes()
    except OSError:
        return None
    return folder if same and target.resolve() != folder.resolve() else None


def _from_hub(name: HubName) -> Path:
    """Return the path of a model in its present version on the hub, or in the cached version if the hub
    cannot be reached."""
    try:
        return download(name)
    except Unreachable as error:
        cached = cached_path(name)
        if cached is None:
            raise CheckpointError(f"{error}, and the model is not in the cache") from error
        return cached
