"""Open the GGUF files of a model: one file, or all parts of a split one."""

import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamserve.gguf.header import MAX_HEADER, TensorInfo, read_header
from streamserve.gguf.metadata import Metadata
from streamserve.gguf.paths import PART, part_name
from streamserve.protocol.errors import CheckpointError

MAX_PARTS = 1000

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class GgufModel:
    """The metadata of a model's first file, and the tensors of all its files by name. `data` maps each
    tensor's name to the memory-mapped file that contains it. The files must not be changed while the model is
    in use."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    data: dict[str, Bytes]

    @property
    def files(self) -> set[Path]:
        """The files that contain the tensors."""
        return {Path(str(mapped.filename)) for mapped in self.data.values() if isinstance(mapped, np.memmap)}

    def stored(self, name: str) -> Bytes:
        """Return a tensor in its stored encoding, as a view of the file: [rows, bytes a row]."""
        info = self.tensors[name]
        flat = self.data[name][info.offset : info.offset + info.nbytes]
        return flat.reshape(-1, info.shape[-1] // info.type.numbers * info.type.nbytes)


def open_gguf(path: Path) -> GgufModel:
    """Return the model in the file `path`; the further parts of a split model are opened too. Raises
    CheckpointError for a file that is missing or damaged."""
    metadata, tensors, data = _open(path)
    count = metadata.integer("split.count", 1, minimum=0, maximum=MAX_PARTS)
    if count > 1:
        part = PART.fullmatch(path.name)
        if part is None or int(part[3]) != count or metadata.integer("split.no", None, 0) != 0:
            metadata.refuse(
                "split.count", f"is {count}: the file must be called {part_name('NAME', 1, count)}"
            )
        for number in range(2, count + 1):
            _add_part(path.with_name(part_name(part[1], number, count)), number - 1, tensors, data)
        if metadata.integer("split.tensors.count", len(tensors), 0) != len(tensors):
            metadata.refuse("split.tensors.count", f"contradicts the {len(tensors)} tensors of the files")
    return GgufModel(path, metadata, tensors, data)


def _add_part(path: Path, number: int, tensors: dict[str, TensorInfo], data: dict[str, Bytes]) -> None:
    metadata, own, bytes_of = _open(path)
    if metadata.integer("split.no", None, 0) != number:
        metadata.refuse("split.no", f"must be {number}")
    twice = own.keys() & tensors.keys()
    if twice:
        raise CheckpointError(f"{path}: tensor {min(twice)!r} is in another file, too")
    tensors.update(own)
    data.update(bytes_of)


def _open(path: Path) -> tuple[Metadata, dict[str, TensorInfo], dict[str, Bytes]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would not end
            raise CheckpointError(f"{path} is not a file, but a pipe, a device or a socket: remove it")
        mapped = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error
    header = read_header(path, memoryview(mapped.data)[:MAX_HEADER], len(mapped))
    return Metadata(path, header.entries), header.tensors, dict.fromkeys(header.tensors, mapped)
