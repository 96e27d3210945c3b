"""The tensors of GGUF files under Hugging Face names, as floats or as the stored integers."""

import ctypes
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.formats.checkpoint import SAMPLE_BYTES, is_finite
from streamserve.execution.formats.gguf.blocks import FORMATS, unpack
from streamserve.execution.formats.gguf.families import FAMILIES
from streamserve.execution.formats.gguf.names import (
    ROPE_FREQUENCIES,
    ROPE_LONG,
    ROPE_SHORT,
    expert_of,
    layer_tensor,
    stored_name,
)
from streamserve.execution.formats.mapped import read_ahead, release
from streamserve.execution.formats.quantization import (
    BlockRows,
    BlockWeight,
    QuantizedWeight,
    WeightFormat,
    common_format,
    join,
    widen,
)
from streamserve.execution.model.shapes import router_modules
from streamserve.execution.model.spec import ModelSpec
from streamserve.gguf.files import Bytes, GgufModel
from streamserve.protocol.errors import CheckpointError

log = logging.getLogger(__name__)

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_LOGGED = 8
NUMBERS_AT_ONCE = 1 << 22
"""Numbers that are unpacked at a time: as floats they take several times the memory of their blocks."""


class GgufCheckpoint:
    """The tensors of a model with `spec`, by their names in Hugging Face layout. Rows of queries and keys are
    in the order of that layout too."""

    def __init__(self, model: GgufModel, spec: ModelSpec) -> None:
        self._model = model
        self._family = FAMILIES[model.metadata.text("general.architecture")]
        self._heads: dict[str, int] = {}
        self._experts = spec.experts.count if spec.experts else 0
        further = range(spec.num_layers, spec.num_layers + spec.predictors)
        self._further = tuple(layer_tensor(layer, "") for layer in further)
        if self._family.permuted:
            heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}
            for layer in range(spec.num_layers):
                for part, count in heads.items():
                    for kind in ("weight", "bias"):
                        self._heads[self._stored(f"model.layers.{layer}.{part}.{kind}")] = count

    @property
    def path(self) -> Path:
        """The path of the checkpoint's first file."""
        return self._model.path

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the checkpoint has exactly the tensors of `shapes`."""
        tensors = self._model.tensors
        known = {ROPE_FREQUENCIES, ROPE_SHORT, ROPE_LONG}
        for name, shape in shapes.items():
            stored = self._stored(name)
            known.add(stored)
            if stored not in tensors:
                raise CheckpointError(f"{self.path}: no file holds tensor {stored}")
            if expert_of(name) is not None:
                shape = (self._experts, *shape)
            elif shape[0] == 1:  # a shared expert's gate
                shape = shape[1:]
            if tensors[stored].shape != shape:
                self._refuse(stored, f"has shape {list(tensors[stored].shape)}, not {list(shape)}")
            is_vector = len(shape) == 1 or stored.endswith(".bias")
            if is_vector and tensors[stored].type.name not in FLOATS:
                self._refuse(stored, f"is of type {tensors[stored].type.name}: a vector must be of floats")
        for stored in sorted(name for name in tensors.keys() - known if not name.startswith(self._further)):
            self._refuse(stored, "is unknown to this architecture")

    def log_rounded(self, spec: ModelSpec, dtype: torch.dtype, head_is_stored: bool) -> None:
        """Log the matrices that are rounded to floats of `dtype`. Matrices that are computed in their stored
        format are not rounded; `head_is_stored`: whether the head is computed in its stored format. Routers,
        in float32, never are."""
        exact = {kind for kind, held in FLOATS.items() if held == dtype or dtype == torch.float32}
        formats = spec.stored.by_module if spec.stored else {}
        modules = [module for module, stored in formats.items() if stored] + router_modules(spec)
        held = {self._stored(f"{module}.weight") for module in modules}
        if head_is_stored:
            held.add(self._stored("lm_head.weight"))
        rounded = [
            f"{name} ({info.type.name})"
            for name, info in self._model.tensors.items()
            if not name.startswith(self._further)
            and len(info.shape) >= 2
            and name.endswith(".weight")
            and name not in held
            and info.type.name not in exact
        ]
        if rounded:
            names = ", ".join(rounded[:MAX_LOGGED]) + (" and others" if len(rounded) > MAX_LOGGED else "")
            to = str(dtype).removeprefix("torch.")
            log.info("%s: %d matrices are rounded to %s: %s", self.path, len(rounded), to, names)

    def dtype(self, name: str) -> torch.dtype:
        """Return a dtype that represents a tensor's numbers: its stored dtype if it is stored as floats,
        float32 if it is stored in blocks of integers."""
        return FLOATS.get(self._model.tensors[self._stored(name)].type.name, torch.float32)

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the tensors of `names` in `dtype`, joined along their first dimension, as a copy. Raises
        CheckpointError for a tensor that contains NaN or an infinity, before or after the conversion."""
        return torch.cat([self._floats(name, dtype) for name in names])

    def integers(self, module: str, format: WeightFormat) -> QuantizedWeight:
        """Return the weight of `module`, which is stored in blocks of integers, in `format`, which must be
        able to represent it exactly."""
        return join([widen(part, format) for part in self._unpacked(f"{module}.weight")])

    def in_blocks(self, name: str) -> bool:
        """Return whether a tensor is stored in blocks of integers."""
        return self._model.tensors[self._stored(name)].type.name in FORMATS

    def blocks(self, modules: Sequence[str], format: WeightFormat | None = None) -> BlockWeight:
        """Return the joined weights of `modules`, which are all stored in blocks of integers, as views of the
        file, not checked for NaN. They are to be packed in `format`, by default their common one."""
        parts, inputs = [], 0
        for module in modules:
            stored = self._stored(f"{module}.weight")
            info = self._model.tensors[stored]
            inputs = info.shape[-1]
            parts.append(BlockRows(info.type.name, self._view(f"{module}.weight"), self._order(stored)))
        return BlockWeight(
            tuple(parts), inputs, format or common_format([FORMATS[part.kind] for part in parts])
        )

    def view(self, name: str) -> Tensor:
        """Return a tensor of floats in its stored dtype, not checked for NaN: a view of the file, or a copy
        if the file has its rows in another order."""
        info, stored = self._model.tensors[self._stored(name)], self._view(name)
        if self._order(self._stored(name)) is not None:
            content = torch.from_numpy(self._bytes(name))
        else:  # torch.from_numpy would warn, because numpy's view is read-only
            array = (ctypes.c_uint8 * stored.nbytes).from_address(stored.ctypes.data)
            content = torch.frombuffer(array, dtype=torch.uint8)
        shape = info.shape if expert_of(name) is None else info.shape[1:]
        return content.view(-1).view(FLOATS[info.type.name]).view(shape)

    def read_ahead(self, layer: int) -> None:
        """Start reading a layer's tensors from the disk, if the layer exists."""
        prefix = layer_tensor(layer, "")
        for name in self._model.tensors:
            if name.startswith(prefix):
                content = self._model.stored(name)
                read_ahead(content.ctypes.data, content.nbytes)

    def release(self) -> None:
        """Release the pages of all files that this process has read (mapped.py)."""
        release(self._model.files)

    def fingerprint(self, *also: str) -> str:
        """Return a hash of the strings `also`, and of every tensor's name, shape, type and a sample of its
        bytes (start, middle and end)."""
        digest = hashlib.blake2b(digest_size=16)
        for text in also:
            digest.update(text.encode() + b"\0")
        for name, info in sorted(self._model.tensors.items()):
            digest.update(f"{name} {info.shape} {info.type.name}\0".encode())
            content = self._model.stored(name).reshape(-1)
            for start in (0, len(content) // 2, max(0, len(content) - SAMPLE_BYTES)):
                digest.update(content[start : start + SAMPLE_BYTES].tobytes())
        return digest.hexdigest()

    def _stored(self, name: str) -> str:
        return stored_name(name, self._family.post_norm)

    def _floats(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._model.tensors[self._stored(name)]
        if info.type.name in FLOATS:
            stored = torch.from_numpy(self._bytes(name)).view(FLOATS[info.type.name])
            shape = info.shape if expert_of(name) is None else info.shape[1:]
            return self._converted(name, stored, dtype).view(shape)
        parts = (self._converted(name, part.floats(), dtype) for part in self._unpacked(name))
        return torch.cat(list(parts))

    def _converted(self, name: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        converted = numbers.to(dtype)
        if not is_finite(converted):
            reason = f"holds numbers that are not finite in {str(dtype).removeprefix('torch.')}"
            self._refuse(self._stored(name), reason)
        return converted

    def _unpacked(self, name: str) -> Iterator[QuantizedWeight]:
        """Yield the unpacked weight of a matrix of blocks, some rows at a time."""
        info = self._model.tensors[self._stored(name)]
        stored = torch.from_numpy(self._bytes(name))
        for rows in torch.split(stored, max(1, NUMBERS_AT_ONCE // info.shape[-1])):
            weight = unpack(info.type.name, rows.view(len(rows), -1, info.type.nbytes))
            largest = weight.scales * weight.format.largest
            if not is_finite(largest) or not (weight.offsets is None or is_finite(weight.offsets)):
                self._refuse(self._stored(name), "holds numbers that are not finite")
            yield weight

    def _bytes(self, name: str) -> Bytes:
        """Return a copy of a tensor, or of an expert's part of it, in its stored encoding [rows, bytes a
        row], with rows in Hugging Face order."""
        view, order = self._view(name), self._order(self._stored(name))
        if order is None:
            return np.array(view)
        ordered: Bytes = view.reshape(len(order), -1)[order].reshape(view.shape)
        return ordered

    def _view(self, name: str) -> Bytes:
        """Return a tensor, or an expert's part of it, as a view of the file."""
        expert, stored = expert_of(name), self._model.stored(self._stored(name))
        if expert is None:
            return stored
        part: Bytes = stored.reshape(self._experts, -1, stored.shape[1])[expert]
        return part

    def _order(self, stored: str) -> NDArray[np.int64] | None:
        """Return the row of the file's tensor for each row in Hugging Face order; None if the orders are
        equal. The file has the two dimensions of a rotated pair next to each other; Hugging Face has, in each
        head, the first dimensions of all pairs before the second ones."""
        if stored not in self._heads:
            return None
        rows = np.arange(self._model.tensors[stored].shape[0])
        return rows.reshape(self._heads[stored], -1, 2).swapaxes(1, 2).flatten()

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tensor {name!r:.200} {reason}")
