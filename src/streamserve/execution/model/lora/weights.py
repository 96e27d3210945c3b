"""The matrices of a LoRA adapter in PEFT's folder, checked against the base model.

PEFT's names are the module's name after `base_model.model.`, followed by `.lora_A.weight` [rank, in] or by
`.lora_B.weight` [out, rank].
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any, NoReturn

import safetensors
import torch
from torch import Tensor

from streamserve.execution.formats.checkpoint import is_finite
from streamserve.execution.model.lora.config import LoraConfig, read_config
from streamserve.execution.model.lora.targets import Targets
from streamserve.execution.model.shapes import matrix_shapes
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.adapters import CONFIG_FILE, WEIGHTS_FILE, file_limit, read_files
from streamserve.protocol.errors import CheckpointError

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_LAYER = re.compile(r"model\.layers\.(?P<layer>[0-9]{1,5})\.(?P<name>.+)")
TRAINED_IN_FULL = "modules trained in full (modules_to_save) are not served: merge them into the model"
_OTHERS = {
    ".lora_embedding_": "adapters of embeddings are not served",
    ".lora_magnitude_vector": "DoRA is not served: train with use_dora=False, or merge it into the model",
    ".modules_to_save.": TRAINED_IN_FULL,
    ".bias": "biases of adapters are not served",
    ".embed_tokens": "adapters of embeddings are not served",
    "lm_head": "adapters of the output head are not served",
    ".experts": "adapters of experts are not served",
    ".mlp.gate.": "adapters of routers are not served",
    ".router": "adapters of routers are not served",
}
"""Reasons for refusing a tensor, by a part of its name."""


class LinearKind(IntEnum):
    """The linear maps of a layer, with joined matrices. The values equal LoraMap in cpp/lora.h."""

    QKV = 0
    OUT = 1
    GATE_UP = 2
    DOWN = 3


KINDS = {
    "self_attn.q_proj": LinearKind.QKV, "self_attn.k_proj": LinearKind.QKV,
    "self_attn.v_proj": LinearKind.QKV, "self_attn.qkv_proj": LinearKind.QKV,
    "self_attn.o_proj": LinearKind.OUT,
    "mlp.gate_proj": LinearKind.GATE_UP, "mlp.up_proj": LinearKind.GATE_UP,
    "mlp.gate_up_proj": LinearKind.GATE_UP, "mlp.down_proj": LinearKind.DOWN,
}  # fmt: skip
"""The map that computes each linear module of a layer. The modules of a map are in the order of its
outputs."""

Place = tuple[int, LinearKind]
"""A linear map of a model: its layer and its kind."""


@dataclass(frozen=True)
class LowRankPart:
    """The addition of an adapter to one module: scale · B (A x), with `a` [rank, in] and `b` [out, rank].
    `first` is the module's first output in its map."""

    first: int
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter's matrices, by linear map."""

    parts: Mapping[Place, tuple[LowRankPart, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(part.a.nbytes + part.b.nbytes for parts in self.parts.values() for part in parts)


def served_modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of the modules that may have adapters, by name: the modules of attention,
    and of the MLP in layers without experts."""
    return {module: shape for module, shape in matrix_shapes(spec).items() if _place_of(module)}


def adapter_bytes(spec: ModelSpec, rank: int, itemsize: int) -> int:
    """Return the bytes of an adapter of all modules with `rank`, with `itemsize` bytes a number."""
    return rank * itemsize * sum(rows + columns for rows, columns in served_modules(spec).values())


def read_adapter(
    path: str, fingerprint: str, spec: ModelSpec, dtype: torch.dtype, max_rank: int, max_bytes: int
) -> AdapterWeights:
    """Return the matrices of the adapter in the folder `path`, rounded to `dtype`. Raises CheckpointError,
    which names file and tensor or the flag to change, for an adapter that is not supported, takes more than
    `max_bytes`, or whose files do not have the hash `fingerprint`."""
    config_bytes, content, found = read_files(path, file_limit(max_bytes))
    if found != fingerprint:
        raise CheckpointError(f"{path}: its files have changed since it was loaded: load it under a new name")
    config = read_config(f"{path}/{CONFIG_FILE}", config_bytes, max_rank)
    reader = _Reader(f"{path}/{WEIGHTS_FILE}", content, spec, dtype)
    return reader.read(config, max_bytes)


class _Reader:
    """A reader of an adapter's tensors in the safetensors `content` of the file `name`."""

    def __init__(self, name: str, content: bytes, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._name, self._dtype = name, dtype
        self._shapes = served_modules(spec)
        self._all = matrix_shapes(spec)
        self._first = _first_outputs(self._shapes)
        try:
            tensors = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{name}: cannot be read as safetensors: {error}") from error
        self._entries: dict[str, dict[str, Any]] = dict(tensors)

    def read(self, config: LoraConfig, max_bytes: int) -> AdapterWeights:
        """Return the adapter's matrices. Raises CheckpointError if they do not match the configuration or the
        model, or take more than `max_bytes`."""
        modules = self._modules()
        self._check_targets(modules, config.targets)
        size = self._dtype.itemsize * sum(
            config.rank_of(module) * sum(self._shapes[module]) for module in modules
        )
        if size > max_bytes:
            raise CheckpointError(
                f"{self._name}: takes {size} bytes, more than the {max_bytes} bytes that are left for "
                "adapters: raise --max-lora-bytes"
            )
        parts = [(place_of(module), self._part(module, config)) for module in modules]
        return AdapterWeights(
            {
                place: tuple(part for _, part in each)
                for place, each in groupby(parts, key=lambda item: item[0])
            }
        )

    def _modules(self) -> list[str]:
        """Return the adapted modules in the order of the model. Raises CheckpointError for a tensor that is
        not supported."""
        matrices = dict[str, set[str]]()
        for name in self._entries:
            match = _TENSOR.fullmatch(name)
            if match is None or match["module"] not in self._shapes:
                self._refuse(name, self._reason(name, match["module"] if match else ""))
            matrices.setdefault(match["module"], set()).add(match["matrix"])
        for module, found in matrices.items():
            if len(found) < 2:
                self._refuse(f"{module}.lora_{min({'A', 'B'} - found)}", "is missing")
        if not matrices:
            raise CheckpointError(f"{self._name}: holds no adapter")
        return [module for module in self._shapes if module in matrices]

    def _check_targets(self, modules: list[str], targets: Targets) -> None:
        """Raise CheckpointError for a module with tensors to which PEFT would give no adapter: PEFT would
        ignore these tensors."""
        other = next((module for module in modules if module not in targets), None)
        if other is not None:
            self._refuse(
                f"base_model.model.{other}.lora_A.weight",
                f"is not served: {CONFIG_FILE} gives its module no adapter (target_modules, exclude_modules, "
                "layers_to_transform): correct these fields, or save the adapter with PEFT",
            )

    def _reason(self, name: str, module: str) -> str:
        if module in self._all:
            return "is an adapter of experts, which is not served: merge it into the model"
        reason = next((reason for part, reason in _OTHERS.items() if part in name), "")
        if name.endswith(".weight") and ".lora_" not in name:
            reason = TRAINED_IN_FULL
        return f"is not served: {reason or 'the model has no such linear module'}"

    def _part(self, module: str, config: LoraConfig) -> LowRankPart:
        rows, columns = self._shapes[module]
        rank = config.rank_of(module)
        a = self._matrix(f"base_model.model.{module}.lora_A.weight", (rank, columns))
        b = self._matrix(f"base_model.model.{module}.lora_B.weight", (rows, rank))
        return LowRankPart(self._first[module], a, b, config.scale_of(module))

    def _matrix(self, name: str, shape: tuple[int, int]) -> Tensor:
        entry = self._entries[name]
        if entry["dtype"] not in ("F32", "F16", "BF16"):
            self._refuse(name, f"has dtype {entry['dtype']}, not F32, F16 or BF16")
        if tuple(entry["shape"]) != shape:
            self._refuse(name, f"has shape {list(entry['shape'])}, not {list(shape)}")
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry["dtype"]]
        tensor = torch.frombuffer(entry["data"], dtype=dtype).view(shape).to(self._dtype)
        if not is_finite(tensor):
            self._refuse(name, "holds numbers that are not finite (NaN or infinite)")
        return tensor

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._name}: tensor {name} {reason}")


def _first_outputs(shapes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return, for each module, the index of its first output in its map."""
    first, width = dict[str, int](), dict[Place, int]()
    for module, (rows, _) in shapes.items():
        place = place_of(module)
        first[module] = width.get(place, 0)
        width[place] = first[module] + rows
    return first


def _place_of(module: str) -> Place | None:
    match = _LAYER.fullmatch(module)
    kind = KINDS.get(match["name"]) if match else None
    return None if match is None or kind is None else (int(match["layer"]), kind)


def place_of(module: str) -> Place:
    """Return the linear map of the model that computes a module, which must be one that adapters may
    change."""
    place = _place_of(module)
    assert place is not None
    return place
