"""Weights of 8 or 4 bits: unsigned integers with a scale, and perhaps an offset, for each group of inputs.

A weight is scale · (q - 128) in 8 bits, scale · q + offset in 4 bits. Which integers stand for a 16-bit
weight is decided here, what a product with them is in native/cpp/gemm_int.cpp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
"""Weights are packed in whole tiles of so many inputs."""

GROUPS = (32, 64, 128)
"""Sizes that a group of inputs may have."""


@dataclass(frozen=True)
class WeightFormat:
    """`bits` of a weight (8 or 4) and the inputs of a `group` that share a scale."""

    bits: int
    group: int

    def __str__(self) -> str:
        return f"int{self.bits}:{self.group}"

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its share of scale and offset (float32)."""
        return self.bits / 8 + (4 if self.bits == 8 else 8) / self.group


DEFAULT_GROUPS = {8: 128, 4: 64}


def parse_format(text: str) -> WeightFormat | None:
    """Return the format that `--quantization` names: none, int8, int4, int8:GROUP or int4:GROUP. Raises
    ValueError for others."""
    if text == "none":
        return None
    kind, separator, size = text.partition(":")
    bits = {"int8": 8, "int4": 4}.get(kind)
    if bits is None or (separator and size not in map(str, GROUPS)):
        choices = ", ".join(map(str, GROUPS))
        raise ValueError(f"{text!r}: use none, int8, int4, or int4:GROUP with a group of {choices}")
    return WeightFormat(bits, int(size) if size else DEFAULT_GROUPS[bits])


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [out, in] in `format`: `numbers` [out, padded in] (uint8, one a byte), `scales` and `offsets`
    [out, groups] (float32; no offsets: symmetric). The padding's numbers stand for zero, or have no scale."""

    format: WeightFormat
    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None

    def floats(self) -> Tensor:
        """Return what the numbers stand for, in float32 [out, padded in]."""
        group = self.format.group
        scales = self.scales.repeat_interleave(group, 1)[:, : self.numbers.shape[1]]
        if self.offsets is None:
            return scales * (self.numbers.float() - (1 << (self.format.bits - 1)))
        return scales * self.numbers + self.offsets.repeat_interleave(group, 1)[:, : self.numbers.shape[1]]


def quantize(weight: Tensor, format: WeightFormat) -> IntegerWeight:
    """Return `weight` [out, in] rounded to `format`: symmetric in 8 bits, from least to largest in 4."""
    rows, columns = weight.shape
    width = -(-columns // TILE) * TILE
    groups = -(-width // format.group)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * format.group - columns))
    grouped = padded.view(rows, groups, format.group)
    if format.bits == 8:
        scales = grouped.abs().amax(2) / 127
        numbers = (grouped / _divisor(scales)).round().clamp(-127, 127) + 128
        offsets = None
    else:
        least, most = grouped.amin(2), grouped.amax(2)
        scales, offsets = (most - least) / 15, least
        numbers = ((grouped - least[:, :, None]) / _divisor(scales)).round().clamp(0, 15)
    numbers = numbers.to(torch.uint8).view(rows, -1)[:, :width].contiguous()
    return IntegerWeight(format, numbers, scales, offsets)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)[:, :, None]
