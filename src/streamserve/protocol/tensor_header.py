"""Check the header of a safetensors file before anything is read or allocated for its tensors.

    length: u64, little-endian   header: JSON   data of the tensors, one after the other

For each tensor, the header has its dtype, its shape, and the begin and end of its data in bytes from the
start of all data.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from streamserve.protocol.errors import CheckpointError

MAX_HEADER_BYTES = 64 << 20
"""Maximum size of a header. The header of a hundred thousand tensors has some ten million bytes."""

MAX_DIMENSIONS, MAX_ELEMENTS = 8, 1 << 48
"""Maximum number of dimensions, and of elements, of a tensor: far more than any model has."""

LENGTH_BYTES = 8

_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of an element, by dtype as safetensors names it."""

LFS_POINTER = b"version https://git-lfs.github.com/"
"""The first bytes of a Git LFS pointer, which replaces a large file in clones without Git LFS."""

MAX_POINTER_BYTES = 1024
"""Maximum size of a Git LFS pointer, by its specification."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its dtype as safetensors names it, its shape, and its data, bytes `begin` to `end`
    (exclusive)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError if a file that starts with these bytes is a Git LFS pointer."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path}: is a Git LFS pointer, not the file itself: run `git lfs install` and `git lfs pull` in "
            "its folder, or download the model with `streamserve models pull`"
        )


def read_tensor_header(path: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a safetensors file by name. Only the header is read.

    Raises CheckpointError naming the tensor and the field if the header is damaged, contradicts itself, or
    does not cover exactly the bytes of the file; OSError if the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(LENGTH_BYTES, len(LFS_POINTER)))
        check_lfs_pointer(path, start)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if len(start) < LENGTH_BYTES or length > size - LENGTH_BYTES:
            _refuse(path, f"the file has {size} bytes, fewer than its header says: it is not complete")
        if length > MAX_HEADER_BYTES:
            _refuse(path, f"its header has {length} bytes: at most {MAX_HEADER_BYTES} are read")
        file.seek(LENGTH_BYTES)
        content = file.read(length)
    tensors = {
        name: _tensor(path, name, entry)
        for name, entry in _entries(path, content).items()
        if name != "__metadata__"
    }
    _check_places(path, tensors, size - LENGTH_BYTES - length)
    return tensors


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: cannot be read as safetensors: {reason}")


def _entries(path: Path, content: bytes) -> dict[str, Any]:
    """Return the header's JSON object. Refuse it if a name occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise ValueError("a name occurs twice")
        return entries

    try:
        entries = json.loads(content.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is not JSON: {error}")
    if not isinstance(entries, dict):
        _refuse(path, "its header must be a JSON object")
    return entries


def _tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    """Return a tensor from its header entry. Raises CheckpointError for fields of a wrong type or size."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    values: list[Any] = [fields.get(field) for field in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = values
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(path, f"tensor {name}: dtype {_shown(dtype)} is unknown")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        _refuse(
            path, f"tensor {name}: shape must be a list of up to {MAX_DIMENSIONS} sizes, not {_shown(shape)}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        _refuse(path, f"tensor {name}: data_offsets must be two positions in the file, not {_shown(offsets)}")
    begin, end = offsets
    if begin > end:
        _refuse(path, f"tensor {name}: data_offsets {_shown(offsets)} end before they begin")
    if any(size > MAX_ELEMENTS for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        _refuse(path, f"tensor {name}: shape {_shown(shape)} has more than {MAX_ELEMENTS} elements")
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        _refuse(
            path,
            f"tensor {name}: data_offsets {_shown(offsets)} do not hold {dtype} of shape {_shown(shape)}",
        )
    return StoredTensor(dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], size: int) -> None:
    """Raise CheckpointError unless the tensors follow each other without gaps and end with the file. `size`
    is the number of bytes of all data."""
    position, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < position:
            _refuse(path, f"tensor {name}: data_offsets begin at byte {tensor.begin}, inside tensor {before}")
        if tensor.begin > position:
            _refuse(
                path, f"tensor {name}: data_offsets leave {tensor.begin - position} bytes before it unused"
            )
        position, before = tensor.end, name
    if position != size:
        reason = "it is not complete" if position > size else "its header does not cover all of it"
        _refuse(path, f"its tensors end at byte {position} of {size}: {reason}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
