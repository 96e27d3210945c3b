"""GPTQ checkpoints of 4 and 8 bits, written by AutoGPTQ and GPTQModel: the tensors of a weight [out, in].

    qweight   int32 [in · bits / 32, out]       words of consecutive inputs' numbers
    qzeros    int32 [groups, out · bits / 32]   words of consecutive outputs' zero points, less 1 in version 1
    scales    float [groups, out]               weight = scale · (number - zero point)
    g_idx     int32 [in]                        the group of each input
    bias      float [out]                       zero if the architecture has none

A word has its first number in the lowest bits. With one group an output, groups is 1. Version 1 cannot
represent a zero point of 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor
from streamserve.execution.formats.quantization import StripedWeight, WeightFormat
from streamserve.execution.formats.stored.formats import (
    Linears,
    Shape,
    StoredFormat,
    StoredFormats,
    formats_of_layers,
    group_size,
    refuse_dynamic,
    require,
)
from streamserve.execution.formats.stored.order import index_header, input_order
from streamserve.execution.formats.stored.words import unpack, words
from streamserve.execution.model.fields import Fields, shown

VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""The number that must be added to stored zero points, by `checkpoint_format`."""

BLOCKS = "model.layers"
MODULES = "modules_in_block_to_quantize"


@dataclass(frozen=True)
class GPTQ:
    """GPTQ storage of `weights` of 4 or 8 bits.

    * `missing`: what must be added to a stored zero point to get the true zero point.
    * `ordered`: whether the checkpoint must have `g_idx`, because a group may consist of any inputs.
      Otherwise the inputs of a group are adjacent.
    """

    weights: WeightFormat
    missing: int
    ordered: bool

    def headers(self, module: str, shape: Shape) -> dict[str, ExpectedTensor]:
        """Return the required tensors of the weight of `module`, with shape [out, in], by name."""
        rows, columns = shape
        bits, groups = self.weights.bits, self.weights.groups(columns)
        return {
            f"{module}.qweight": ExpectedTensor((words(columns, bits), rows), ("I32",)),
            f"{module}.qzeros": ExpectedTensor((groups, words(rows, bits)), ("I32",)),
            f"{module}.scales": ExpectedTensor((groups, rows)),
            f"{module}.g_idx": index_header(columns, optional=not self.ordered),
            f"{module}.bias": ExpectedTensor((rows,), optional=True, zero=True),
        }

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> StripedWeight:
        """Return the weight of `module`, whose tensors were checked. Raises CheckpointError for numbers that
        the format does not have."""
        rows, columns = shape
        order = input_order(checkpoint, f"{module}.g_idx", columns, self.weights.group)
        packed = checkpoint.view(f"{module}.qweight")
        scales = checkpoint.tensor([f"{module}.scales"], torch.float32).T.contiguous()
        zeros = self._zeros(checkpoint, f"{module}.qzeros", rows)

        def numbers(first: int, last: int) -> Tensor:
            strip = unpack(packed[:, first:last].T.contiguous(), self.weights.bits, columns)
            return strip if order is None else strip[:, order]

        return StripedWeight(self.weights, shape, numbers, scales, zeros, order)

    def _zeros(self, checkpoint: Checkpoint, name: str, rows: int) -> Tensor | None:
        """Return the zero points [out, groups]; None for symmetric weights, whose stored zero points are
        checked."""
        bits = self.weights.bits
        stored = unpack(checkpoint.integers(name), bits, rows).T.contiguous()
        if self.missing and bool((stored == (1 << bits) - 1).any()):
            checkpoint.refuse(name, f"holds a zero point of {1 << bits}, which has more than {bits} bits")
        zeros = stored + self.missing
        if not self.weights.symmetric:
            return zeros
        if not bool((zeros == self.weights.middle).all()):
            checkpoint.refuse(name, f"holds zero points other than {self.weights.middle}, though sym is true")
        return None


def read_formats(fields: Fields, tied_head: bool, linears: Linears) -> StoredFormats:
    """Return the formats of each layer's matrices `linears`. Raises CheckpointError for other variants of
    GPTQ."""
    bits = fields.integer("bits")
    if bits not in (4, 8):
        fields.refuse("bits", f"{bits} is not supported (supported: 4, 8)")
    refuse_dynamic(fields)
    for name in ("adapter", "rotation"):
        if fields.get(name):
            fields.refuse(name, "is not supported")
    require(fields, "lm_head", False)
    require(fields, "is_marlin_format", False)
    require(fields, "pack_dtype", "int32")
    require(fields, "block_name_to_quantize", BLOCKS)
    require(fields, "format", *VERSIONS)
    require(fields, "checkpoint_format", *VERSIONS)
    version = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    format = WeightFormat(bits, group_size(fields), fields.flag("sym", True))
    stored = GPTQ(format, VERSIONS[version], fields.flag("desc_act", False))
    quantized = _modules(fields, linears)

    def format_of(module: str) -> StoredFormat | None:
        return stored if module.split(".", 3)[3] in quantized else None

    return formats_of_layers(fields, MODULES, format_of, linears)


def _modules(fields: Fields, linears: Linears) -> frozenset[str]:
    """Return the names in `linears` that are quantized in each layer. The config has a list of names, a list
    of lists, or nothing, which means all."""
    value, known = fields.get(MODULES), frozenset(name for names in linears for name in names)
    if value is None:
        return known
    groups = value if isinstance(value, list) else [value]
    names = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    unknown = [name for name in names if name not in known]
    if unknown:
        fields.refuse(MODULES, f"{shown(unknown[0])} is not a linear module of a layer")
    return frozenset(names)
