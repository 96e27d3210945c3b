"""LoRA adapters, identified between processes by the hash of their files. A name in the API belongs to one
adapter at a time, but blocks, transfers and requests carry the hash."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.tensor_header import MAX_HEADER_BYTES, read_tensor_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RANKED = ".lora_A.weight"
"""The last part of the names of matrices with shape [rank, inputs]."""

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHT_BYTES = 16 << 30
"""Maximum size of an adapter's weights, while the limits of a server are not known yet."""

FILE_FACTOR = 2
"""Maximum size of an adapter's file relative to its matrices in memory: a file may hold float32 numbers for a
model that computes in 16 bits."""

MAX_WIDTH = 1 << 20
"""Maximum inputs and outputs of an adapted module: more than any model has."""

MAX_NAME = 256
"""Maximum length of an adapter's name, in characters."""

Fingerprint = Annotated[str, msgspec.Meta(max_length=64)]
"""The hash of an adapter's files; "" stands for the base model."""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name in the API, its folder in PEFT's layout, and the hash of its files."""

    name: str
    path: str
    fingerprint: Fingerprint


def open_adapter(name: str, path: str, max_rank: int | None = None, max_bytes: int | None = None) -> Adapter:
    """Return the adapter in the folder `path`, whose files are read to hash them. `max_bytes` limits its
    matrices, in the data type that the model computes in.

    Raises CheckpointError if files are missing or too large, or if the header of the weights has sizes that
    no adapter of up to `max_rank` has. Such weights are not read.
    """
    folder = folder_of(path)
    files = _files(folder, MAX_WEIGHT_BYTES if max_bytes is None else file_limit(max_bytes))
    _check_header(files[-1].path, max_rank)
    return Adapter(name, str(folder), _digest(_pieces(file) for file in files))


def file_limit(max_bytes: int) -> int:
    """Return the maximum size of a file of weights whose matrices take `max_bytes` in the model's data
    type."""
    return FILE_FACTOR * max_bytes + MAX_HEADER_BYTES


def folder_of(path: str) -> Path:
    """Return the absolute path of a folder, whose ~ is the user's home."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def read_files(path: str, max_weight_bytes: int) -> tuple[bytes, bytes, str]:
    """Return the content of an adapter's configuration and weights, and its hash. Raises CheckpointError if a
    file is missing or too large."""
    config, weights = (b"".join(_pieces(file)) for file in _files(Path(path), max_weight_bytes))
    return config, weights, _digest(((config,), (weights,)))


def _check_header(path: Path, max_rank: int | None) -> None:
    """Raise CheckpointError unless the header of an adapter's weights names tensors of sizes that adapters of
    up to `max_rank` have."""
    try:
        tensors = read_tensor_header(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from error
    for name, tensor in tensors.items():
        wide = max(tensor.shape, default=0)
        if wide > MAX_WIDTH:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}: no module has more than {MAX_WIDTH} "
                "inputs or outputs"
            )
        rank = tensor.shape[0] if name.endswith(RANKED) and tensor.shape else 0
        if max_rank and rank > max_rank:
            raise CheckpointError(
                f"{path}: tensor {name} has rank {rank}, above the largest rank that this server takes: "
                f"raise --max-lora-rank (now {max_rank})"
            )


_PIECE = 1 << 20


@dataclass(frozen=True)
class _File:
    """A file of an adapter, and the maximum number of bytes to read of it."""

    path: Path
    limit: int


def _files(folder: Path, max_weight_bytes: int) -> list[_File]:
    """Return an adapter's two files. Raises CheckpointError if one is missing or exceeds its limit."""
    files = [
        _File(folder / CONFIG_FILE, MAX_CONFIG_BYTES),
        _File(folder / WEIGHTS_FILE, min(max_weight_bytes, MAX_WEIGHT_BYTES)),
    ]
    for file in files:
        try:
            status = file.path.stat()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file.path}: cannot be read ({_reason(error)}): an adapter is a folder with "
                f"{CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT saves it"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file.path}: is not a file")
        if status.st_size > file.limit:
            raise _too_large(file)
    return files


def _pieces(file: _File) -> Iterator[bytes]:
    """Yield the content of a file in pieces. Raises CheckpointError if it cannot be read, or has grown too
    large."""
    size = 0
    try:
        with file.path.open("rb") as opened:
            while piece := opened.read(_PIECE):
                size += len(piece)
                if size > file.limit:
                    raise _too_large(file)
                yield piece
    except OSError as error:
        raise CheckpointError(f"{file.path}: cannot be read: {_reason(error)}") from error


def _digest(contents: Iterable[Iterable[bytes]]) -> str:
    """Return one hash of several contents, each given in pieces."""
    whole = blake2b(digest_size=16)
    for pieces in contents:
        digest = blake2b(digest_size=16)
        for piece in pieces:
            digest.update(piece)
        whole.update(digest.digest())
    return whole.hexdigest()


def _too_large(file: _File) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: has more than {file.limit} bytes, the most that are read: see --max-lora-bytes"
    )


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def check_name(name: str, taken: frozenset[str]) -> str:
    """Return why an adapter cannot have a name; "" if it can. `taken`: names of models and adapters."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        return f"a name has 1 to {MAX_NAME} printable characters, without spaces around it: {name!r:.80}"
    return f"the name {name!r} is in use" if name in taken else ""
