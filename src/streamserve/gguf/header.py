"""Read the header of a GGUF file: its metadata, and the position of each tensor. Files may be damaged or
hostile: counts have maxima, and lengths are compared with the remaining bytes before memory is allocated.

    "GGUF"  version: u32  tensors: u64  entries: u64
    entry   key: string, type: u32, value                          string: length: u64, UTF-8
    tensor  name: string, dimensions: u32, sizes: u64 …, type: u32, offset: u64
    data    from the next multiple of general.alignment; offsets count from there

Numbers are little-endian; sizes begin with the fastest dimension.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamserve.gguf.metadata import MAX_SIZE
from streamserve.protocol.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 64 << 20
"""Maximum bytes of a header: a vocabulary of 250,000 tokens takes about ten million."""
MAX_ENTRIES, MAX_TENSORS = 10_000, 200_000
MAX_STRINGS = 4 << 20
"""Maximum number of strings in all arrays of a file together."""
MAX_NAME = 256
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
"""Types of metadata values by their number in the file, as numpy dtypes."""
BOOLEAN, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorType:
    """A storage format of numbers: blocks of `numbers` values take `nbytes` bytes."""

    name: str
    numbers: int
    nbytes: int


TYPES = {
    0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18), 3: TensorType("Q4_1", 32, 20), 6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24), 8: TensorType("Q8_0", 32, 34), 10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110), 12: TensorType("Q4_K", 256, 144), 13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210), 20: TensorType("IQ4_NL", 32, 18), 23: TensorType("IQ4_XS", 256, 136),
    39: TensorType("MXFP4", 32, 17),
}  # fmt: skip
"""Supported types of tensors, by their number in the file."""

UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""Names of unsupported types of tensors, for messages."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's shape (the last dimension varies fastest), type, and byte offset from the file's begin."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.nbytes


@dataclass(frozen=True)
class GGUFHeader:
    """A parsed header: the metadata by key and the tensors by name."""

    entries: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A reader of a file's first bytes, in order. `path` is for messages."""

    def __init__(self, path: Path, data: bytes | memoryview) -> None:
        self.path = path
        self.position = 0
        self._data = data
        self._strings_left = MAX_STRINGS

    def refuse(self, reason: str) -> NoReturn:
        """Raise CheckpointError for the file."""
        raise CheckpointError(f"{self.path}: {reason}")

    def read(self, count: int) -> bytes | memoryview:
        if count > len(self._data) - self.position:
            self.refuse(f"the header ends after {len(self._data)} bytes, in the middle of an entry")
        self.position += count
        return self._data[self.position - count : self.position]

    def integer(self, code: str) -> int:
        """Return the next integer; `code` is its type in the notation of `struct`."""
        (value,) = struct.unpack("<" + code, self.read(struct.calcsize(code)))
        return int(value)

    def count(self, what: str, maximum: int) -> int:
        """Return the next count, a u64. Raises CheckpointError if it is above `maximum`."""
        value = self.integer("Q")
        if value > maximum:
            self.refuse(f"has {value} {what}: at most {maximum} are supported")
        return value

    def string(self, maximum: int = MAX_HEADER) -> str:
        """Return the next string, of at most `maximum` bytes."""
        return self._decoded(self.read(self.count("bytes in a string", maximum)))

    def strings(self, count: int) -> list[str]:
        """Return the next `count` strings. A vocabulary has hundreds of thousands, so `string` is not called
        for each: one loop is faster."""
        if count > self._strings_left:
            self.refuse(f"has more than {MAX_STRINGS} strings in arrays")
        self._strings_left -= count
        data, length, at, texts = self._data, struct.Struct("<Q").unpack_from, self.position, list[str]()
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length(data, at)[0]
                if at > len(data):
                    break
                texts.append(str(data[begin:at], "utf-8"))
        except struct.error:
            at = len(data) + 1
        except UnicodeDecodeError:
            self.refuse("has a string that is not UTF-8")
        self.read(at - self.position)
        return texts

    def value(self) -> Any:
        """Return the next value, which its type precedes."""
        kind = self.integer("I")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        item = self._numbers(kind, 1)[0]
        return bool(item) if kind == BOOLEAN else item.item()

    def _array(self) -> Any:
        kind, count = self.integer("I"), self.count("items in an array", MAX_HEADER)
        return self.strings(count) if kind == STRING else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        if kind not in SCALARS:
            self.refuse(f"has a value of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.read(count * dtype.itemsize), dtype).copy()

    def _decoded(self, data: bytes | memoryview) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            self.refuse("has a string that is not UTF-8")


def read_header(path: Path, data: bytes | memoryview, size: int) -> GGUFHeader:
    """Return the header of a file of `size` bytes; `data` are its first bytes, at most MAX_HEADER. Raises
    CheckpointError for a damaged header, and for tensors that are not within the file."""
    cursor = _Cursor(path, data)
    tensor_count, entry_count = _counts(cursor)
    entries = _by_name(cursor, "entry", entry_count, lambda: cursor.value())
    alignment = entries.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
        cursor.refuse(
            f"general.alignment must be a multiple of 8 up to {MAX_ALIGNMENT}, not {alignment!r:.80}"
        )
    infos = _by_name(cursor, "tensor", tensor_count, lambda: _tensor(cursor))
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorInfo(shape, type, start + offset) for name, (shape, type, offset) in infos.items()}
    _check_places(cursor, tensors, size, alignment, start)
    return GGUFHeader(entries, tensors)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of entries."""
    if bytes(cursor.read(4)) != MAGIC:
        cursor.refuse("is not a GGUF file: it does not begin with GGUF")
    version = cursor.integer("I")
    if version not in VERSIONS:
        big_endian = version.to_bytes(4, "big") in {number.to_bytes(4, "little") for number in VERSIONS}
        kind = "of big-endian numbers" if big_endian else f"{version}"
        cursor.refuse(f"GGUF version {kind} is not supported (supported: 2 and 3, little-endian)")
    return cursor.count("tensors", MAX_TENSORS), cursor.count("entries", MAX_ENTRIES)


def _by_name(cursor: _Cursor, what: str, count: int, read: Callable[[], Any]) -> dict[str, Any]:
    """Return the next `count` items by name; `read` reads the content after a name. `what` is for
    messages."""
    found = dict[str, Any]()
    for _ in range(count):
        name = cursor.string(MAX_NAME)
        if not (name.isascii() and name.isprintable()):
            cursor.refuse(f"{what} {name!r} must have a name of printable ASCII")
        if name in found:
            cursor.refuse(f"{what} {name!r} appears twice")
        found[name] = read()
    return found


def _tensor(cursor: _Cursor) -> tuple[tuple[int, ...], TensorType, int]:
    """Return the next tensor's shape, type and offset. The file has the fastest dimension first: the shape is
    reversed, so that it is the last."""
    dimensions = cursor.integer("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.refuse(f"has a tensor of {dimensions} dimensions: 1 to {MAX_DIMENSIONS} are supported")
    shape = tuple(cursor.count("numbers in a dimension", MAX_SIZE) for _ in range(dimensions))[::-1]
    number = cursor.integer("I")
    if number not in TYPES:
        names = ", ".join(type.name for type in TYPES.values())
        shown = UNSUPPORTED.get(number, f"number {number}")
        cursor.refuse(f"has a tensor of type {shown}, which is not supported (supported: {names})")
    type = TYPES[number]
    if 0 in shape or shape[-1] % type.numbers:
        cursor.refuse(
            f"has a tensor {list(shape)} of type {type.name}: rows must be blocks of {type.numbers}"
        )
    return shape, type, cursor.integer("Q")


def _check_places(
    cursor: _Cursor, tensors: dict[str, TensorInfo], size: int, alignment: int, start: int
) -> None:
    """Raise CheckpointError unless all tensors are aligned, within the file and do not overlap."""
    end, before = start, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
        if (info.offset - start) % alignment:
            cursor.refuse(f"tensor {name!r} is not at a multiple of {alignment} bytes")
        if info.offset < end:
            cursor.refuse(f"tensor {name!r} overlaps {before!r}")
        end, before = info.offset + info.nbytes, name
        if end > size:
            cursor.refuse(f"tensor {name!r} ends at byte {end} of {size}: the file is not complete")
