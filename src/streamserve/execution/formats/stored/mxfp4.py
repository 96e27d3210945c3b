"""MXFP4 checkpoints of experts with stacked matrices, the published form of gpt-oss: the tensors of a layer.

    mlp.experts.gate_up_proj_blocks    uint8 [experts, out, in / 32, 16]   two numbers a byte
    mlp.experts.gate_up_proj_scales    uint8 [experts, out, in / 32]       exponents e
    mlp.experts.down_proj_…            likewise

The first number of a byte is in its low bits. A number is 2^(e - 127) · m, where the four bits m are a sign,
two bits of exponent and one of fraction. Gates and values alternate in the outputs of gate_up_proj.
"""

from dataclasses import dataclass

import torch

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor, is_finite
from streamserve.execution.formats.gguf.blocks import mxfp4_scales
from streamserve.execution.formats.quantization import StripedWeight, WeightFormat
from streamserve.execution.formats.stored.formats import (
    Linears,
    Shape,
    StoredFormat,
    StoredFormats,
    formats_of_layers,
    skipped_modules,
)
from streamserve.execution.model.experts import in_halves, is_routed, stack_of
from streamserve.execution.model.fields import Fields

BLOCK = 32
"""Number of weights in a block."""
FORMAT = WeightFormat(4, BLOCK, symmetric=True, table="mxfp4")


@dataclass(frozen=True)
class MXFP4:
    """The format of a matrix in a stack of `experts` experts."""

    experts: int
    weights: WeightFormat = FORMAT

    def headers(self, module: str, shape: Shape) -> dict[str, ExpectedTensor]:
        """Return the required tensors of the stack that contains `module`, by name. `shape` is the shape
        [out, in] of one matrix."""
        stack, _ = stack_of(module)
        rows, blocks = shape[0], self.weights.groups(shape[1])
        return {
            f"{stack}_blocks": ExpectedTensor((self.experts, rows, blocks, BLOCK // 2), ("U8",)),
            f"{stack}_scales": ExpectedTensor((self.experts, rows, blocks), ("U8",)),
        }

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> StripedWeight:
        """Return the weight of `module`, whose tensors were checked. Raises CheckpointError for scales that
        would make weights infinite."""
        stack, number = stack_of(module)
        packed = checkpoint.part(f"{stack}_blocks", number)
        halves = torch.stack([packed & 15, packed >> 4], dim=-1)
        scales = mxfp4_scales(checkpoint.part(f"{stack}_scales", number))
        if not is_finite(scales * self.weights.largest):
            checkpoint.refuse(f"{stack}_scales", "holds scales of weights that float32 cannot hold")
        numbers = in_halves(module, halves.reshape(shape))
        return StripedWeight(
            self.weights, shape, lambda first, last: numbers[first:last], in_halves(module, scales)
        )


def read_formats(fields: Fields, tied_head: bool, linears: Linears) -> StoredFormats:
    """Return the formats of each layer's matrices `linears`. Raises CheckpointError unless the experts are
    quantized."""
    for part in skipped_modules(fields, "modules_to_not_convert"):
        if "experts" in part:
            fields.refuse("modules_to_not_convert", f"{part!r:.80} is not supported: experts are quantized")
    counts = [sum(map(is_routed, names)) // 2 for names in linears]

    def format_of(module: str) -> StoredFormat | None:
        return MXFP4(counts[int(module.split(".")[2])]) if is_routed(module) else None

    return formats_of_layers(fields, "modules_to_not_convert", format_of, linears)
