"""Weights of 8-bit floats (e4m3) in the methods `fp8` and `compressed-tensors`: the tensors of a weight
[out, in].

    method fp8           weight             e4m3 [out, in]
                         weight_scale_inv   float [out / rows, in / columns]   a scale for each block
                                            float []                           without weight_block_size
                         activation_scale   float []                           if static; not used here
    compressed-tensors   weight             e4m3 [out, in]
                         weight_scale       float [1]                           strategy tensor
                                            float [out, 1]                      strategy channel
                                            float [out / rows, in / columns]    strategy block
                         input_scale        float [1]                           if static; not used here

A weight is scale · number; the scale is called inverse because weights were divided by it. The number of
blocks is rounded up.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor
from streamserve.execution.formats.quantization import (
    GROUPS,
    LARGEST_FLOAT,
    NOT_A_NUMBER,
    StripedWeight,
    WeightFormat,
)
from streamserve.execution.formats.stored.formats import (
    Linears,
    Shape,
    StoredFormat,
    StoredFormats,
    formats_of_layers,
    require,
    skipped_modules,
)
from streamserve.execution.model.fields import Fields, shown

MAX_SCALE = torch.finfo(torch.float32).max / LARGEST_FLOAT
"""Maximum scale: its product with any e4m3 number is finite in float32."""


@dataclass(frozen=True)
class Floats:
    """The format of e4m3 weights with scales in the tensor `scale_name`: one scale, one for each output, or
    one for each block of `block_rows` outputs and a group of inputs. `activation_scale`: the name of a scale
    for rounding activations, which is not used."""

    weights: WeightFormat
    scale_name: str
    scales: Literal["tensor", "channel", "block"]
    block_rows: int = 1
    activation_scale: str | None = None

    def headers(self, module: str, shape: Shape) -> dict[str, ExpectedTensor]:
        """Return the required tensors of the weight of `module`, with shape [out, in], by name."""
        rows, columns = shape
        blocks = -(-rows // self.block_rows), self.weights.groups(columns)
        scales = (1,) if self.scales == "tensor" else blocks
        tensors = {
            f"{module}.weight": ExpectedTensor(shape, ("F8_E4M3",)),
            f"{module}.{self.scale_name}": ExpectedTensor(scales),
        }
        if self.activation_scale:
            tensors[f"{module}.{self.activation_scale}"] = ExpectedTensor((1,))
        return tensors

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> StripedWeight:
        """Return the weight of `module`, whose tensors were checked. Raises CheckpointError for numbers that
        are not finite, and for scales that would make weights infinite."""
        stored = checkpoint.view(f"{module}.weight").view(torch.uint8)

        def numbers(first: int, last: int) -> Tensor:
            strip = stored[first:last].clone()
            if bool((strip & NOT_A_NUMBER == NOT_A_NUMBER).any()):
                checkpoint.refuse(f"{module}.weight", "holds numbers that are not finite (NaN)")
            return strip

        name = f"{module}.{self.scale_name}"
        scales = checkpoint.tensor([name], torch.float32)
        if float(scales.abs().max()) > MAX_SCALE:
            checkpoint.refuse(name, "holds scales of weights that float32 cannot hold")
        if self.scales == "tensor":
            scales = scales.expand(shape[0]).unsqueeze(1)
        rows = scales.repeat_interleave(self.block_rows, 0)[: shape[0]].contiguous()
        return StripedWeight(self.weights, shape, numbers, rows)


def floating(group: int | None) -> WeightFormat:
    """Return the e4m3 format with a scale for each `group` of inputs; None: for all inputs of an output."""
    return WeightFormat(8, group, symmetric=True, floating=True)


def block_of(fields: Fields, name: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a block, from the field `name`."""
    value = fields.get(name)
    if value is None:
        fields.refuse(name, "is missing")
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
    if not whole or not 0 < value[0] <= max(GROUPS) or value[1] not in GROUPS:
        choices = ", ".join(map(str, GROUPS))
        reason = f"(supported: up to {max(GROUPS)} outputs, and {choices} inputs)"
        fields.refuse(name, f"{shown(value)} is not supported {reason}")
    return value[0], value[1]


def read_formats(fields: Fields, tied_head: bool, linears: Linears) -> StoredFormats:
    """Return the formats of each layer's matrices `linears`. Raises CheckpointError for other variants of
    fp8."""
    for name in ("kv_cache_scheme", "modules_to_convert"):
        if fields.get(name):
            fields.refuse(name, "is not supported")
    require(fields, "activation_scheme", "dynamic", "static")
    require(fields, "fmt", "e4m3")
    require(fields, "scale_fmt", "float", "ue8m0")
    static = "activation_scale" if fields.get("activation_scheme") == "static" else None
    stored = Floats(floating(None), "weight_scale_inv", "tensor", activation_scale=static)
    if fields.get("weight_block_size") is not None:
        rows, columns = block_of(fields, "weight_block_size")
        stored = Floats(floating(columns), "weight_scale_inv", "block", rows, static)
    listed = "ignored_layers" if fields.get("modules_to_not_convert") is None else "modules_to_not_convert"
    skipped = skipped_modules(fields, listed)

    def format_of(module: str) -> StoredFormat | None:
        # Entries are compared with whole parts of a module's name: mlp.gate does not match mlp.gate_proj.
        return None if any(f".{part}." in f".{module}." for part in skipped) else stored

    return formats_of_layers(fields, listed, format_of, linears)
