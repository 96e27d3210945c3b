"""The memory-mapped safetensors files of a model folder, validated before loading."""

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

from streamserve.execution.formats.mapped import read_ahead, release
from streamserve.execution.model.fields import read_fields
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.tensor_header import read_tensor_header

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
SINGLE = f"model{SUFFIX}"
BASE = "model."
"""Prefix of the base model's tensors in checkpoints that also have an output head."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAMPLE_BYTES = 64
"""Bytes that a fingerprint covers at each sampled place of a tensor."""
MAPPED_PART, MAPPED_BYTES = 100, 4 << 20
"""Pages of read tensors are released when these exceed both 1/MAPPED_PART of the files and MAPPED_BYTES."""


NUMBER: set[tuple[int, ...]] = {(), (1,)}
"""Shapes of a single number: a tensor may have either one."""


@dataclass(frozen=True)
class ExpectedTensor:
    """The required shape of a tensor, and its allowed dtypes, in the names of safetensors. An `optional`
    tensor may be missing. A tensor that must be `zero` is checked, and not loaded."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = tuple(_DTYPES)
    optional: bool = False
    zero: bool = False


class Checkpoint:
    """The tensors of `folder` by their plain names. If `base_model` allows a base model, its tensors' names
    get the prefix `BASE`. Tensors whose names have one of the prefixes `left_out` are left out. Raises
    CheckpointError for a file that is missing or damaged."""

    def __init__(self, folder: Path, base_model: bool = False, left_out: tuple[str, ...] = ()) -> None:
        self.path = folder
        self._files = {
            name: entry for name, entry in _open_files(folder).items() if not name.startswith(left_out)
        }
        self._stored: Mapping[str, str] = {}
        names = {name: plain_name(name) for name in self._files}
        if base_model and not any(name.startswith(BASE) for name in names.values()):
            names = {stored: BASE + name for stored, name in names.items()}
        self._stored = self._rename(names)
        self._paths = {path for path, _ in self._files.values()}
        self._limit = max(MAPPED_BYTES, sum(path.stat().st_size for path in self._paths) // MAPPED_PART)
        self._mapped_bytes = 0  # bytes of the tensors read since the last release

    def _rename(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Rename the tensors from the files' names to their model's names, as `names` maps them; return the
        reverse mapping. Raises CheckpointError if two tensors get the same name."""
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

    def check(self, headers: Mapping[str, ExpectedTensor], ignored: Iterable[str] = ()) -> None:
        """Raise CheckpointError unless the checkpoint has exactly the tensors of `headers`. Further tensors
        are allowed if their names end in one of `ignored`."""
        for name, expected in headers.items():
            if name not in self._files:
                if expected.optional:
                    continue
                raise CheckpointError(f"{self.path}: no file holds tensor {name}")
            header = self._files[name][1].get_slice(name)
            if header.get_dtype() not in expected.dtypes:
                self.refuse(name, f"has dtype {header.get_dtype()}, not {' or '.join(expected.dtypes)}")
            shapes = {tuple(header.get_shape()), expected.shape}
            if len(shapes) > 1 and not shapes <= NUMBER:
                self.refuse(name, f"has shape {header.get_shape()}, not {list(expected.shape)}")
            if expected.zero and self._mapped(name).any():
                self.refuse(name, "is not zero, but the architecture has no such bias")
        allowed = tuple(ignored)
        for name in sorted(self._files.keys() - headers.keys()):
            if not name.endswith(allowed):
                self.refuse(name, "is unknown to this architecture")

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise CheckpointError for the tensor `name`. The message has the tensor's name in the file."""
        raise CheckpointError(f"{self._files[name][0]}: tensor {self._stored.get(name, name)} {reason}")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor in its file; None if there is no such tensor."""
        return tuple(self._files[name][1].get_slice(name).get_shape()) if name in self._files else None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in its file. The tensor must have passed `check`."""
        return _DTYPES[self._files[name][1].get_slice(name).get_dtype()]

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the tensors of `names` in `dtype`, joined along their first dimension, as a copy. Raises
        CheckpointError for a tensor that contains NaN or an infinity, before or after the conversion."""
        parts = [self._finite(name, dtype) for name in names]
        return torch.cat([part if part.dim() else part.view(1) for part in parts])

    def view(self, name: str) -> Tensor:
        """Return a tensor as a contiguous view of the file, not checked for NaN. Do not keep it: the file may
        be replaced while the view exists."""
        return self._mapped(name).contiguous()

    def integers(self, name: str) -> Tensor:
        """Return a copy of a tensor in its stored dtype."""
        return self._mapped(name).clone()

    def part(self, name: str, number: int) -> Tensor:
        """Return a copy of entry `number` of a tensor's first dimension, in its stored dtype."""
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
        """Start reading a layer's tensors from the disk, if the layer exists."""
        for name in self._files:
            if name.startswith(f"{BASE}layers.{layer}."):
                content = self._files[name][1].get_tensor(name)  # _mapped would race: it counts bytes
                read_ahead(content.data_ptr(), content.nbytes)

    def release(self) -> None:
        """Release the pages of all files that this process has read (mapped.py)."""
        release(self._paths)
        self._mapped_bytes = 0

    def fingerprint(self, *also: str) -> str:
        """Return a hash of the strings `also`, and of every tensor's name, shape, dtype and a sample of its
        bytes (start, middle and end). It does not depend on the distribution of the tensors over files."""
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
        """Return a tensor as a view of the file. Do not keep it: the file may be replaced while the view
        exists.

        Reading a few bytes maps many pages, so the pages of tensors read before are released if these are
        many.
        """
        tensor: Tensor = self._files[name][1].get_tensor(name)
        if self._mapped_bytes + tensor.nbytes > self._limit:
            self.release()
        self._mapped_bytes += tensor.nbytes
        return tensor


@dataclass(frozen=True)
class _Renamed:
    """An open file whose tensors have other names in the model. `stored` maps these to the names in the
    file."""

    file: Any
    stored: Mapping[str, str]

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(self.stored[name])

    def get_tensor(self, name: str) -> Any:
        return self.file.get_tensor(self.stored[name])


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that torch inserts into the names of wrapped modules (distributed, compiled, checkpointed)."""

_TEXT_MODEL = (("model.language_model.", BASE), ("language_model.model.", BASE), ("language_model.", ""))
"""Prefixes of a text model's tensors in multimodal checkpoints, and in a checkpoint of the text model
alone."""


def plain_name(stored: str) -> str:
    """Return a tensor's name without the parts that saving a wrapped or multimodal model adds."""
    name = _WRAPPERS.sub("", stored)
    for prefix, plain in _TEXT_MODEL:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, in one pass that allocates nothing: minimum and maximum are NaN
    if any number is."""
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
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(SUFFIX):
            weight_map.refuse(name, f"must name a {SUFFIX} file of the folder, not {shard!r:.80}")
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
