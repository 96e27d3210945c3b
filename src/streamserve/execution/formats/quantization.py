"""Weights of 8 or 4 bits: unsigned integers q, or floats of 8 bits, with a scale for each group of inputs.

An integer q stands for scale · (q - zero point), or for scale · q + minimum. Without either, weights are
symmetric: scale · (q - 128) in 8 bits, scale · (q - 8) in 4. A float f (e4m3) stands for scale · f, an index
q of a table for scale · table[q]. This module rounds 16-bit weights; native/cpp/gemm_int.cpp (integers) and
gemm_fma.cpp (floats) multiply with the rounded ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 64
"""Number of inputs in a tile; weights are packed in whole tiles."""

GROUPS = (32, 64, 128)
"""Sizes of a group of inputs in settings; some stored formats have groups of 16."""

MAX_INPUTS = (2**31 - 1) // (255 * 127)
"""Maximum inputs of a group: up to it no sum of 8-bit products overflows 32 bits."""

LEVEL_INPUTS = 256
"""Number of inputs that share the upper level of scales of two levels."""

SHRINK = (0.95, 0.9)
"""Parts of a group's range that are tried for weights with zero points. The range with the smallest squared
error is taken."""

BLOCK = 1 << 20
"""Number of weights that are rounded at a time."""

LARGEST_FLOAT = 448.0
"""Largest number in e4m3, floats of 8 bits: a sign, 4 bits of exponent and 3 of fraction."""

NOT_A_NUMBER = 0x7F
"""The bits of NaN in e4m3, without the sign. There are no infinities."""


Table = Literal["mxfp4", "iq4"]
"""Names of the tables that 4-bit numbers may be indices of."""

TABLES: dict[Table, tuple[int, ...]] = {
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""mxfp4: the e2m1 floats (a sign, two bits of exponent, one of fraction), times two to be integers. iq4: the
table of GGUF's IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class WeightFormat:
    """A quantized format: numbers of `bits` (8 or 4) bits, and a scale for each `group` of inputs (None: for
    all inputs of an output). `symmetric`: without zero points or minimums. `floating`: the numbers are e4m3,
    with 8 bits and symmetric. `precise`: with minimums, or scales that do not fit into 16 bits. `table`: the
    numbers are 4-bit indices of this table, and symmetric. `levels`: each scale and minimum is a product of
    an integer of 8 bits with a float16 that LEVEL_INPUTS inputs share; such a format is also precise."""

    bits: int
    group: int | None
    symmetric: bool
    floating: bool = False
    precise: bool = False
    table: Table | None = None
    levels: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.group or 'channel'}"

    @property
    def kind(self) -> Literal["int8", "int4", "fp8"] | Table:
        if self.floating:
            return "fp8"
        if self.table:
            return self.table
        return "int8" if self.bits == 8 else "int4"

    @property
    def middle(self) -> int:
        """The number that stands for zero in a symmetric weight."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        """An upper bound of the magnitude of integers or table entries, that is of weights with scale 1."""
        return 1 << (8 if self.table else self.bits)

    def groups(self, inputs: int) -> int:
        """Return the number of groups that `inputs` inputs have."""
        return -(-inputs // self.group) if self.group else 1

    def nbytes(self, outputs: int, inputs: int, two_levels: bool = True) -> int:
        """Return the bytes of a weight [outputs, inputs] with its scales and offsets. A checkpoint whose
        scales need 32 bits in a format that is not `precise` takes more. `two_levels`: scales of two levels
        are stored as by the CPU kernels, otherwise as products in float32."""
        numbers, tables = inputs * self.bits // 8, 1 if self.symmetric else 2
        if self.levels and two_levels:
            return outputs * (numbers + tables * (self.groups(inputs) + 2 * -(-inputs // LEVEL_INPUTS)))
        size = 4 * tables if self.wide_tables else 1 + tables
        if self.table == "mxfp4":
            size = 1  # powers of two
        return outputs * (numbers + size * self.groups(inputs))

    @property
    def wide_tables(self) -> bool:
        """Whether scales and offsets are in float32, instead of scales in 16 bits and zero points in 8."""
        return self.floating or self.precise or not (self.symmetric or self.bits == 4)


DEFAULT_GROUPS = {8: 128, 4: 64}
HEAD_FORMAT = WeightFormat(8, DEFAULT_GROUPS[8], symmetric=True)
"""The default format of the head."""


def parse_format(text: str) -> WeightFormat | None:
    """Return the format of a value of `--quantization`: none, int8, int4, int8:GROUP, int4:GROUP or w8a8.
    Raises ValueError for any other text."""
    if text == "none":
        return None
    if text in ("w8a8", "int8:channel"):
        return WeightFormat(8, None, symmetric=True)
    kind, separator, size = text.partition(":")
    bits = {"int8": 8, "int4": 4}.get(kind)
    if bits is None or (separator and size not in map(str, GROUPS)):
        choices = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"{text!r}: use int8, int4, w8a8, or int8:GROUP, int4:GROUP with a group of {choices}"
        )
    return WeightFormat(bits, int(size) if size else DEFAULT_GROUPS[bits], symmetric=bits == 8)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] in `format`: `numbers` [out, in] (uint8: integers, or the bits of finite floats) and
    finite `scales` [out, groups] (float32). If it is not symmetric, it has either zero points `zeros` [out,
    groups] (uint8), or finite `minimums` [out, groups] (float32), the weights of the integer 0. With an
    `order` [in] (int64), column c of the numbers belongs to input order[c]."""

    format: WeightFormat
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (output features, input features)."""
        rows, columns = self.numbers.shape
        return rows, columns

    @property
    def offsets(self) -> Tensor | None:
        """The offsets that the kernels add, [out, groups] in float32: minimums, or -(zero point · scale)."""
        if self.minimums is not None:
            return self.minimums
        return None if self.zeros is None else -(self.zeros * self.scales)

    def floats(self) -> Tensor:
        """Return the weights that the numbers stand for, [out, in] in float32."""
        inputs = self.numbers.shape[1]
        group = self.format.group or inputs

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(group, 1)[:, :inputs]

        scales = spread(self.scales)
        if self.format.floating:
            columns = scales * self.numbers.view(torch.float8_e4m3fn).float()
        elif self.format.table:
            columns = scales * looked_up(self.format.table, self.numbers).float()
        elif self.minimums is not None:
            columns = scales * self.numbers.float() + spread(self.minimums)
        else:
            zeros = self.format.middle if self.zeros is None else spread(self.zeros).float()
            columns = scales * (self.numbers.float() - zeros)
        return columns if self.order is None else columns[:, self.order.argsort()]


@dataclass(frozen=True)
class StripedWeight:
    """A QuantizedWeight without minimums whose numbers are unpacked strip by strip: `numbers(first, last)`
    returns the numbers of the outputs first to last - 1, [last - first, in]. It may raise CheckpointError for
    numbers that the format does not have."""

    format: WeightFormat
    shape: tuple[int, int]
    numbers: Callable[[int, int], Tensor]
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    def whole(self) -> QuantizedWeight:
        """Return the weight with all its numbers."""
        numbers = self.numbers(0, self.shape[0])
        return QuantizedWeight(self.format, numbers, self.scales, self.zeros, order=self.order)

    def without_numbers(self) -> QuantizedWeight:
        """Return the weight with scales and zero points, but an empty tensor of numbers."""
        none = torch.empty(self.shape[0], 0, dtype=torch.uint8)
        return QuantizedWeight(self.format, none, self.scales, self.zeros, order=self.order)


class NotFinite(Exception):
    """A stored weight has numbers that are not finite, before or after conversion to the required dtype."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight [out, in] in a checkpoint's floats. Its outputs are the rows of `parts`, which have one dtype,
    contiguous rows and may be views of a file. It is to be packed in `dtype`, or rounded to `format`."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    format: WeightFormat | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (output features, input features)."""
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]


@dataclass(frozen=True)
class BlockRows:
    """Rows of a weight in GGUF's `blocks` [rows, bytes a row] of the type `kind` (gguf/blocks.py), perhaps a
    view of a file. With an `order`, row i of the weight is row order[i] of the blocks."""

    kind: str
    blocks: NDArray[np.uint8]
    order: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class BlockWeight:
    """A weight [out, in] in GGUF's blocks. Its outputs are the rows of `parts`. It is to be packed in
    `format`, which can represent all parts."""

    parts: tuple[BlockRows, ...]
    inputs: int
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (output features, input features)."""
        return sum(len(part.blocks) for part in self.parts), self.inputs


def looked_up(table: Table, indices: Tensor) -> Tensor:
    """Return the entries (int8) of a table at `indices` (uint8)."""
    return torch.tensor(TABLES[table], dtype=torch.int8)[indices.int()]


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight with the concatenated outputs of `weights`, which must have one format and the same
    order of inputs."""
    if len(weights) == 1:
        return weights[0]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    minimums = [weight.minimums for weight in weights if weight.minimums is not None]
    return QuantizedWeight(
        weights[0].format,
        torch.cat([weight.numbers for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(zeros) if zeros else None,
        torch.cat(minimums) if minimums else None,
        order=weights[0].order,
    )


def join_strips(weights: Sequence[StripedWeight]) -> StripedWeight:
    """Return one striped weight with the concatenated outputs of `weights`, which must have one format and
    the same order of inputs."""
    if len(weights) == 1:
        return weights[0]
    tables = join([weight.without_numbers() for weight in weights])

    def numbers(first: int, last: int) -> Tensor:
        parts, begin = [], 0
        for weight in weights:
            low, high = max(first - begin, 0), min(last - begin, weight.shape[0])
            begin += weight.shape[0]
            if low < high:
                parts.append(weight.numbers(low, high))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    shape = tables.shape[0], weights[0].shape[1]
    return StripedWeight(tables.format, shape, numbers, tables.scales, tables.zeros, tables.order)


def common_format(formats: Sequence[WeightFormat]) -> WeightFormat:
    """Return the format with the fewest bits and the largest group to which `widen` can convert weights of
    all `formats`. These must be integers or indices of tables, with groups that divide each other."""
    mixed = len({format.symmetric for format in formats}) > 1
    tables = {format.table for format in formats}
    return WeightFormat(
        8 if len(tables) > 1 else max(format.bits for format in formats),
        min(format.group or MAX_INPUTS for format in formats),
        all(format.symmetric for format in formats),
        precise=mixed or any(format.precise for format in formats),
        levels=all(format.levels for format in formats),
        table=tables.pop() if len(tables) == 1 else None,
    )


def widen(weight: QuantizedWeight, format: WeightFormat) -> QuantizedWeight:
    """Return a weight in a `format` with no fewer bits and no larger groups. The
    weight must have integers or indices, no zero points, and no order. Nothing is rounded: integers only
    change by a constant, and indices stay or become 8-bit integers."""
    old = weight.format
    if old == format:
        return weight
    if old.table and format.table is None:
        integers = (looked_up(old.table, weight.numbers).to(torch.int16) + 128).to(torch.uint8)
        old = WeightFormat(8, old.group, symmetric=True)
        weight = replace(weight, format=old, numbers=integers)
    assert not old.floating
    assert weight.zeros is None
    assert weight.order is None
    assert old.group
    assert format.group
    parts, numbers = old.group // format.group, weight.numbers
    if old.symmetric and old.bits < format.bits:
        numbers = numbers + (format.middle - old.middle)
    scales = weight.scales.repeat_interleave(parts, 1)
    if format.symmetric:
        return QuantizedWeight(format, numbers, scales)
    if weight.minimums is None:
        return QuantizedWeight(format, numbers, scales, minimums=scales * -format.middle)
    return QuantizedWeight(format, numbers, scales, minimums=weight.minimums.repeat_interleave(parts, 1))


def quantize(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    """Return `weight` [out, in] rounded to `format`. Scales are rounded to bfloat16, so that every checkpoint
    format can store them exactly."""
    rows = max(1, BLOCK // weight.shape[1])
    return join([_quantize(block, format) for block in torch.split(weight, rows)])


def _quantize(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    rows, inputs = weight.shape
    groups, group = format.groups(inputs), format.group or inputs
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - inputs))
    grouped = padded.view(rows, groups, group)
    if format.floating:
        scales, numbers, zeros = *_round_to_floats(grouped), None
    elif format.symmetric:
        scales, numbers, zeros = *_round_symmetric(grouped, format.middle), None
    else:
        scales, numbers, zeros = _round_with_zeros(grouped, 2 * format.middle - 1)
    return QuantizedWeight(format, numbers.view(rows, -1)[:, :inputs].contiguous(), scales, zeros)


def _round_symmetric(grouped: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Return scales [out, groups] and numbers [out, groups, group] of symmetric integers."""
    largest = middle - 1
    scales = _storable(grouped.abs().amax(2) / largest)
    numbers = (grouped / _divisor(scales)[:, :, None]).round_().clamp_(-largest, largest) + middle
    return scales, numbers.to(torch.uint8)


def _round_to_floats(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [out, groups] and the bits of e4m3 numbers [out, groups, group]."""
    scales = _storable(grouped.abs().amax(2) / LARGEST_FLOAT)
    numbers = (grouped / _divisor(scales)[:, :, None]).clamp_(-LARGEST_FLOAT, LARGEST_FLOAT)
    return scales, numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def _round_with_zeros(grouped: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales [out, groups], numbers [out, groups, group] and zero points [out, groups]. The range of
    every group includes zero, which is represented exactly."""
    low, high = grouped.amin(2, keepdim=True).clamp_(max=0), grouped.amax(2, keepdim=True).clamp_(min=0)
    best = _round_range(grouped, low, high, largest)
    for part in SHRINK:
        other = _round_range(grouped, low * part, high * part, largest)
        better = other[0] < best[0]
        best = [torch.where(better, new, old) for new, old in zip(other, best, strict=True)]
    _, scales, zeros, numbers = best
    return scales[:, :, 0], numbers.to(torch.uint8), zeros[:, :, 0].to(torch.uint8)


def _round_range(grouped: Tensor, low: Tensor, high: Tensor, largest: int) -> list[Tensor]:
    """Return the weights rounded within the range from `low` to `high` [out, groups, 1]: squared errors,
    scales and zero points [out, groups, 1], and numbers [out, groups, group]."""
    scales = _storable(high / largest - low / largest)
    divisor = _divisor(scales)
    zeros = (low / -divisor).round_().clamp_(0, largest)
    numbers = (grouped / divisor).round_().add_(zeros).clamp_(0, largest)
    errors = (numbers - zeros).mul_(scales).sub_(grouped).square_()
    return [_sum(errors), scales, zeros, numbers]


def _sum(values: Tensor) -> Tensor:
    """Return sums over the last dimension. The order of additions is the same on every processor."""
    while values.shape[-1] > 1:
        half = -(-values.shape[-1] // 2)
        first, second = values[..., :half], values[..., half:]
        values = first + torch.nn.functional.pad(second, (0, half - second.shape[-1]))
    return values


def _storable(scales: Tensor) -> Tensor:
    return scales.bfloat16().float()


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)
