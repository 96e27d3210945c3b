"""Common parts of quantization methods: the interface of a stored format, and the formats of a model."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor
from streamserve.execution.formats.quantization import GROUPS, StripedWeight, WeightFormat
from streamserve.execution.model.experts import is_routed
from streamserve.execution.model.fields import Fields, shown

HEAD = "lm_head"
UNQUANTIZED = "unquantized"

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""The names of a layer's linear modules."""

FUSED_LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""The names in architectures whose checkpoints join q, k and v, and gate and up."""

JOINED = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv",
    "gate_proj": "gate_up", "up_proj": "gate_up", "w1": "gate_up", "w3": "gate_up",
}  # fmt: skip
"""Names of the joined weights, by the last part of a linear module's name. Weights of one parent module with
equal names are joined when they are loaded."""

Shape = tuple[int, int]


def is_attention(linear: str) -> bool:
    """Return whether a linear module of a layer belongs to attention."""
    return linear.startswith("self_attn.")


def is_stacked(linears: Iterable[str]) -> bool:
    """Return whether the matrices of all experts of a layer are in one tensor."""
    return any(is_routed(linear) and linear.endswith(".gate_up_proj") for linear in linears)


def joined(linears: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the linear modules of a layer, grouped by the weights that they are joined to at loading."""
    groups: dict[tuple[str, str], list[str]] = {}
    for linear in linears:
        module, name = linear.rsplit(".", 1)
        groups.setdefault((module, JOINED.get(name, name)), []).append(linear)
    return [tuple(group) for group in groups.values()]


class StoredFormat(Protocol):
    """The format of a stored matrix. Implementations are frozen dataclasses, because their fields are part of
    the model's fingerprint."""

    @property
    def weights(self) -> WeightFormat:
        """The format that the matrix is loaded in."""

    def headers(self, module: str, shape: Shape) -> dict[str, ExpectedTensor]:
        """Return the required tensors of the weight of `module`, with shape [out, in], by name."""

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> StripedWeight:
        """Return the weight of `module`, whose tensors were checked against `headers`. Raises CheckpointError
        for numbers that the format does not have."""


@dataclass(frozen=True)
class GgufBlocks:
    """The format of a matrix in the blocks of a GGUF file. `weights` represents the blocks exactly.
    GgufCheckpoint reads them."""

    weights: WeightFormat


AnyFormat = StoredFormat | GgufBlocks


@dataclass(frozen=True)
class StoredFormats:
    """The formats of the matrices of a checkpoint's layers. `layers[layer]` has the formats of
    `linears[layer]`, None for a matrix that is not quantized; at least one matrix is. `head`: the format of
    the head; None: it is not quantized."""

    layers: tuple[tuple[AnyFormat | None, ...], ...]
    linears: tuple[tuple[str, ...], ...]
    head: GgufBlocks | None = None

    @cached_property
    def by_module(self) -> dict[str, AnyFormat | None]:
        """The formats of modules by name, `model.layers.LAYER.LINEAR`."""
        return {
            f"model.layers.{layer}.{linear}": stored
            for layer, (linears, formats) in enumerate(zip(self.linears, self.layers, strict=True))
            for linear, stored in zip(linears, formats, strict=True)
        }

    def of(self, module: str) -> AnyFormat | None:
        return self.by_module[module]

    @property
    def main(self) -> WeightFormat:
        """The most frequent format of the matrices; the first one if several are equally frequent."""
        formats = Counter(stored.weights for layer in self.layers for stored in layer if stored)
        return formats.most_common(1)[0][0]

    def __str__(self) -> str:
        names = {str(stored.weights) if stored else UNQUANTIZED for layer in self.layers for stored in layer}
        return ", ".join(sorted(names))


Linears = Sequence[tuple[str, ...]]
"""The names of each layer's matrices."""

FormatOf = Callable[[str], StoredFormat | None]
"""Returns the format of a linear module by its full name; None if it is not quantized."""


def formats_of_layers(fields: Fields, field: str, format_of: FormatOf, linears: Linears) -> StoredFormats:
    """Return the formats of each layer's matrices `linears`. Raises CheckpointError, which names `field`, if
    matrices that are joined have different formats, or no matrix is quantized."""
    formats = []
    for layer, names in enumerate(linears):
        own = {linear: format_of(f"model.layers.{layer}.{linear}") for linear in names}
        for group in joined(names):
            if len({own[linear] for linear in group}) > 1:
                fields.refuse(field, f"gives {', '.join(group)} of layer {layer} different formats")
        formats.append(tuple(own.values()))
    if not any(any(own) for own in formats):
        fields.refuse(field, "leaves no matrix of the layers to quantize")
    return StoredFormats(tuple(formats), tuple(linears))


def skipped_modules(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the list in field `name`: names of modules that are not quantized, or parts of names."""
    names = fields.get(name) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fields.refuse(name, f"must be a list of names, not {shown(names)}")
    return tuple(name for name in names if name)


def group_size(fields: Fields, name: str = "group_size") -> int | None:
    """Return the number of inputs that share a scale; None if all inputs of an output do (-1)."""
    size = fields.get(name)
    if type(size) is not int or size not in (-1, *GROUPS):
        choices = ", ".join(map(str, GROUPS))
        fields.refuse(name, f"{str(size)[:40]} is not supported (supported: {choices}, -1)")
    return None if size == -1 else size


def refuse_dynamic(fields: Fields) -> None:
    """Raise CheckpointError if the field `dynamic` has formats of single modules, as GPTQModel writes it."""
    if fields.get("dynamic"):
        fields.refuse(
            "dynamic",
            "is not supported: it sets formats for single modules; use a checkpoint with one format for "
            "all modules, a compressed-tensors or GGUF checkpoint (which may mix formats), or the 16-bit "
            "model with --quantization",
        )


def require(fields: Fields, name: str, *supported: object) -> None:
    """Raise CheckpointError unless a field has one of the supported values. An absent or null field counts as
    the first of these values."""
    value = fields.get(name)
    value = supported[0] if value is None else value
    # Types are compared too: 1 == True in Python. A set of the values would fail for unhashable ones.
    if not any(type(value) is type(one) and value == one for one in supported):
        choices = ", ".join(repr(one) for one in supported)
        fields.refuse(name, f"{shown(value)} is not supported (supported: {choices})")
