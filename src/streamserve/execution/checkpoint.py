"""Memory-mapped safetensors of a model folder, one file or several, validated before loading."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamserve.execution.fields import read_fields
from streamserve.execution.mapped import read_ahead, release
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.tensor_header import read_tensor_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BASE = "model."
"""What the names of a base model's tensors begin with in checkpoints that also have an output head."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAMPLE_BYTES = 64
"""Bytes of each place of a tensor that a fingerprint covers."""
MAPPED_PART, MAPPED_BYTES = 100, 4 << 20
"""Tensors that take more than the hundredth part of the files, and so many bytes, are not left in the
process's memory together."""


@dataclass(frozen=True)
class Header:
    """What a tensor must be: its shape, and its dtype, one of those, as safetensors names them. An `optional`
    tensor may be missing; one that must be `zero` is not read for the model."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = tuple(_DTYPES)
    optional: bool = False
    zero: bool = False


class Checkpoint:
    """The tensors of `folder` by their plain names, those of a base model with `BASE` before their names
    where `base_model` allows one. Raises CheckpointError for a file that is missing or damaged."""

    def __init__(self, folder: Path, base_model: bool = False) -> None:
        self.path = folder
        self._files = _open_files(folder)
        self._stored: Mapping[str, str] = {}
        names = {name: plain_name(name) for name in self._files}
        if base_model and not any(name.startswith(BASE) for name in names.values()):
            names = {stored: BASE + name for stored, name in names.items()}
        self._stored = self._rename(names)
        self._paths = {path for path, _ in self._files.values()}
        self._limit = max(MAPPED_BYTES, sum(path.stat().st_size for path in self._paths) // MAPPED_PART)
        self._mapped_bytes = 0  # of tensors that were read since the last release

    def _rename(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Give the tensors `names`, by those in the files; return the latter by the former. Raises
        CheckpointError if two tensors get one name."""
        stored = dict[str, str]()
        for old, name in names.items():
            if name in stored:
                self.refuse(old, f"and tensor {stored[name]} are both {name}: remove one of them")
            stored[name] = old
        if any(old != name for name, old in stored.items()):
            self._files = {
                name: (path, _Renamed(file, stored))
                for name, (path, file) in ((names[old], entry) for old, entry in self._files.items())
            }
        return stored

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, headers: Mapping[str, Header], ignored: Iterable[str] = ()) -> None:
        """Raise CheckpointError unless the tensors are exactly those of `headers`. Further tensors are
        allowed if their names end in one of `ignored`."""
        for name, expected in headers.items():
            if name not in self._files:
                if expected.optional:
                    continue
                raise CheckpointError(f"{self.path}: no file holds tensor {name}")
            header = self._files[name][1].get_slice(name)
            if header.get_dtype() not in expected.dtypes:
                self.refuse(name, f"has dtype {header.get_dtype()}, not {' or '.join(expected.dtypes)}")
            if tuple(header.get_shape()) != expected.shape:
                self.refuse(name, f"has shape {header.get_shape()}, not {list(expected.shape)}")
            if expected.zero and self._mapped(name).any():
                self.refuse(name, "is not zero, but the architecture has no such bias")
        allowed = tuple(ignored)
        for name in sorted(self._files.keys() - headers.keys()):
            if not name.endswith(allowed):
                self.refuse(name, "is unknown to this architecture")

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise CheckpointError for the tensor `name`, which is named as in the file."""
        raise CheckpointError(f"{self._files[name][0]}: tensor {self._stored.get(name, name)} {reason}")

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a checked tensor is stored in."""
        return _DTYPES[self._files[name][1].get_slice(name).get_dtype()]

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return a copy in `dtype` of the tensors of `names`, joined along their first dimension. Raises
        CheckpointError for a tensor that contains NaN or an infinity, as stored or after conversion to
        `dtype`."""
        return torch.cat([self._finite(name, dtype) for name in names])

    def view(self, name: str) -> Tensor:
        """Return a contiguous view of the file, unchecked. Do not keep it: the file may be replaced while the
        view exists."""
        return self._mapped(name).contiguous()

    def integers(self, name: str) -> Tensor:
        """Return a copy of a tensor as it is stored."""
        return self._mapped(name).clone()

    def part(self, name: str, number: int) -> Tensor:
        """Return a copy of entry `number` of a tensor's first dimension, as it is stored."""
        part: Tensor = self._files[name][1].get_slice(name)[number]
        return part.clone()

    def floats(self, name: str, number: int, dtype: torch.dtype) -> Tensor:
        """Return entry `number` of a tensor's first dimension in `dtype`. Raises CheckpointError like
        `tensor`."""
        return self._converted(name, self.part(name, number), dtype)

    def equal(self, first: str, second: str) -> bool:
        """Return whether two tensors contain the same numbers."""
        return bool(torch.equal(self._mapped(first), self._mapped(second)))

    def read_ahead(self, layer: int) -> None:
        """Read the tensors of a layer from the disk, if there is one."""
        for name in self._files:
            if name.startswith(f"{BASE}layers.{layer}."):
                content = self._files[name][1].get_tensor(name)  # not read: another thread counts what is
                read_ahead(content.data_ptr(), content.nbytes)

    def release(self) -> None:
        """Take the files' pages, which have been read, from this process."""
        release(self._paths)
        self._mapped_bytes = 0

    def fingerprint(self, *also: str) -> str:
        """Return a hash of every tensor's name, shape, dtype and a sample of its bytes (start, middle and
        end), and of the strings `also`. It does not depend on how the tensors are distributed over files."""
        digest = hashlib.blake2b(digest_size=16)
        for text in also:
            digest.update(text.encode() + b"\0")
        for name in sorted(self._files):
            tensor = self._mapped(name)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
            content = tensor.reshape(-1).view(torch.uint8)
            for start in (0, len(content) // 2, max(0, len(content) - SAMPLE_BYTES)):
                digest.update(content[start : start + SAMPLE_BYTES].numpy().tobytes())
        return digest.hexdigest()

    def _finite(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._converted(name, self._mapped(name), dtype)

    def _converted(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        converted = tensor.to(dtype)
        if not is_finite(converted):
            reason = "numbers that are not finite (NaN or infinite)"
            if is_finite(tensor):
                reason = f"numbers that {str(dtype).removeprefix('torch.')} cannot hold"
            self.refuse(name, f"holds {reason}")
        return converted

    def _mapped(self, name: str) -> Tensor:
        """Return a view of the file. Do not keep it: the file may be replaced while the view exists.

        A few bytes that are read bring many pages, so what was read before is released if there is much."""
        tensor: Tensor = self._files[name][1].get_tensor(name)
        if self._mapped_bytes + tensor.nbytes > self._limit:
            self.release()
        self._mapped_bytes += tensor.nbytes
        return tensor


@dataclass(frozen=True)
class _Renamed:
    """An open file whose tensors have other names in a model: `stored` are those in the file."""

    file: Any
    stored: Mapping[str, str]

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(self.stored[name])

    def get_tensor(self, name: str) -> Any:
        return self.file.get_tensor(self.stored[name])


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch adds to names of modules that it wraps, for several processes or compiled."""

_TEXT_MODEL = (("model.language_model.", BASE), ("language_model.model.", BASE), ("language_model.", ""))
"""What the names of a text model begin with in a checkpoint for several kinds of input, and what they begin
with in a checkpoint of the text model alone."""


def plain_name(stored: str) -> str:
    """Return the name of a tensor without what saving a wrapped or a contained model adds."""
    name = _WRAPPERS.sub("", stored)
    for prefix, plain in _TEXT_MODEL:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite. One pass that allocates nothing: minimum and maximum are NaN if
    any number is."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _open_files(folder: Path) -> dict[str, tuple[Path, Any]]:
    """Return the open file of each tensor, with its path for messages."""
    if (folder / INDEX).exists():
        return _open_shards(folder)
    if not (folder / SINGLE).exists():
        raise CheckpointError(f"{folder}: contains neither {SINGLE} nor {INDEX} (only safetensors are read)")
    file = _open(folder / SINGLE)
    return dict.fromkeys(file.keys(), (folder / SINGLE, file))


def _open_shards(folder: Path) -> dict[str, tuple[Path, Any]]:
    index = read_fields(folder / INDEX)
    weight_map = index.nested("weight_map")
    if weight_map is None:
        index.refuse("weight_map", "is missing")
    opened: dict[str, Any] = {}
    files = {}
    for name, shard in weight_map.values.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            weight_map.refuse(name, f"must name a file of the folder, not {shard!r}")
        if shard not in opened:
            opened[shard] = _open(folder / shard)
        if name not in opened[shard].keys():  # noqa: SIM118 (not a dict)
            raise CheckpointError(
                f"{folder / shard}: tensor {name} is missing, though {INDEX} places it there"
            )
        files[name] = (folder / shard, opened[shard])
    return files


def _open(path: Path) -> Any:
    try:
        read_tensor_header(path)
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file is missing") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
