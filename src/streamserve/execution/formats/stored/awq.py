"""AWQ checkpoints in AutoAWQ's format `gemm`: the tensors of a weight [out, in].

    qweight   int32 [in, out / 8]       words of eight outputs' numbers
    qzeros    int32 [groups, out / 8]   likewise, of their zero points
    scales    float [groups, out]       weight = scale · (number - zero point)

A word contains its outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits on. With one group an
output, groups is 1.
"""

from dataclasses import dataclass
from functools import partial

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
    skipped_modules,
)
from streamserve.execution.formats.stored.words import unpack, words
from streamserve.execution.model.fields import Fields

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each output in its word."""


@dataclass(frozen=True)
class AWQ:
    """The format of `weights` of 4 bits with zero points, packed into words of adjacent outputs."""

    weights: WeightFormat

    def headers(self, module: str, shape: Shape) -> dict[str, ExpectedTensor]:
        """Return the required tensors of the weight of `module`, with shape [out, in], by name."""
        rows, columns = shape
        groups, width = self.weights.groups(columns), words(rows, self.weights.bits)
        return {
            f"{module}.qweight": ExpectedTensor((columns, width), ("I32",)),
            f"{module}.qzeros": ExpectedTensor((groups, width), ("I32",)),
            f"{module}.scales": ExpectedTensor((groups, rows)),
        }

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> StripedWeight:
        """Return the weight of `module`, whose tensors were checked. Raises CheckpointError for scales that
        are not finite."""

        def unpacked(packed: Tensor, first: int, last: int) -> Tensor:
            """Return the numbers [last - first, in or groups] of outputs `first` to `last` - 1."""
            begin = first // len(PLACES)
            strip = packed[:, begin : words(last, self.weights.bits)]
            in_words = unpack(strip, self.weights.bits, strip.shape[1] * len(PLACES))
            in_order = in_words.view(len(strip), -1, len(PLACES))[:, :, PLACES].flatten(1)
            begin *= len(PLACES)
            return in_order[:, first - begin : last - begin].T.contiguous()

        scales = checkpoint.tensor([f"{module}.scales"], torch.float32).T.contiguous()
        zeros = unpacked(checkpoint.view(f"{module}.qzeros"), 0, shape[0])
        numbers = partial(unpacked, checkpoint.view(f"{module}.qweight"))
        return StripedWeight(self.weights, shape, numbers, scales, zeros)


def read_formats(fields: Fields, tied_head: bool, linears: Linears) -> StoredFormats:
    """Return the formats of each layer's matrices `linears`. Raises CheckpointError for other variants of
    AWQ."""
    bits = fields.integer("bits")
    if bits != 4:
        fields.refuse("bits", f"{bits} is not supported (supported: 4)")
    refuse_dynamic(fields)
    require(fields, "zero_point", True)
    require(fields, "backend", "autoawq", "auto", "legacy_awq")
    for name in ("version", "format", "checkpoint_format"):
        require(fields, name, "gemm", "GEMM")
    skipped = skipped_modules(fields, "modules_to_not_convert")
    stored = AWQ(WeightFormat(bits, group_size(fields), symmetric=False))

    def format_of(module: str) -> StoredFormat | None:
        # As in AutoAWQ, an entry may be any part of a module's name. The files' tensors are compared later.
        return None if any(part in module for part in skipped) else stored

    return formats_of_layers(fields, "modules_to_not_convert", format_of, linears)
