"""Weights of 8 or 4 bits: unsigned integers q, or floats of 8 bits, with a scale for each group of inputs.

An integer stands for scale · (q - zero point), or scale · q + minimum; without either weights are symmetric:
scale · (q - 128) in 8 bits, scale · (q - 8) in 4. A float f (e4m3) stands for scale · f, and an index q of a
table for scale · table[q]. Which integers stand
for a 16-bit weight is decided here, what a product with them is in native/cpp/gemm_int.cpp, with floats in
gemm_fma.cpp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 64
"""Weights are packed in whole tiles of so many inputs."""

GROUPS = (32, 64, 128)
"""Sizes that a group of inputs may have in settings; some stored formats have groups of 16."""

MAX_INPUTS = (2**31 - 1) // (255 * 127)
"""Inputs of a group up to which no sum of 8-bit products overflows 32 bits."""

SHRINK = (0.95, 0.9)
"""Parts of a group's range in which weights with zero points are rounded, where that has a smaller squared
error than the whole range."""

BLOCK = 1 << 20
"""Weights that are rounded at once."""

LARGEST_FLOAT = 448.0
"""The largest number of e4m3, floats of 8 bits: a sign, 4 bits of exponent and 3 of fraction."""

NOT_A_NUMBER = 0x7F
"""The bits of NaN in e4m3, next to the sign. There are no infinities."""


Table = Literal["mxfp4", "iq4"]
"""Tables of which numbers of 4 bits may be indices."""

TABLES: dict[Table, tuple[int, ...]] = {
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""Twice the floats with a sign, two bits of exponent and one of fraction; and GGUF's IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class WeightFormat:
    """`bits` of a weight (8 or 4), the inputs of a `group` that share a scale (None: all of an output),
    whether it is `symmetric`: without zero points or minimums, and whether its numbers are `floating`: e4m3,
    which have 8 bits and are symmetric. `precise`: it has minimums, or scales that 16 bits do not hold.
    `table`: its numbers are indices of 4 bits; it is symmetric."""

    bits: int
    group: int | None
    symmetric: bool
    floating: bool = False
    precise: bool = False
    table: Table | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.group or 'channel'}"

    @property
    def kind(self) -> Literal["int8", "int4", "fp8"] | Table:
        """What the numbers are."""
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
        """A bound of what the numbers stand for with a scale of 1, if they are integers."""
        return 1 << (8 if self.table else self.bits)

    def groups(self, inputs: int) -> int:
        """Return the number of groups of so many inputs."""
        return -(-inputs // self.group) if self.group else 1

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight [outputs, inputs] with its scales and offsets. They take more if a
        checkpoint's scales need 32 bits in a format that is not `precise`."""
        tables = 4 * (1 if self.symmetric else 2) if self.wide_tables else 2 + (not self.symmetric)
        if self.table == "mxfp4":
            tables = 1  # powers of two
        return outputs * (inputs * self.bits // 8 + tables * self.groups(inputs))

    @property
    def wide_tables(self) -> bool:
        """Whether scales and offsets are stored in float32, not in 16 bits and as zero points in 8."""
        return self.floating or self.precise or not (self.symmetric or self.bits == 4)


DEFAULT_GROUPS = {8: 128, 4: 64}
HEAD_FORMAT = WeightFormat(8, DEFAULT_GROUPS[8], symmetric=True)
"""What the head is rounded to."""


def parse_format(text: str) -> WeightFormat | None:
    """Return the format that `--quantization` names: none, int8, int4, int8:GROUP, int4:GROUP or w8a8. Raises
    ValueError for others."""
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
    """A weight [out, in] in `format`: `numbers` [out, in] (uint8: integers, or the bits of finite floats),
    finite `scales` [out, groups] (float32) and, unless it is symmetric, either `zeros` [out, groups] (uint8),
    the zero points, or finite `minimums` [out, groups] (float32), the weights that are zero as integers. With
    an `order` [in] (int64) of the inputs, column c of the numbers is that of input order[c]."""

    format: WeightFormat
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows, columns = self.numbers.shape
        return rows, columns

    @property
    def offsets(self) -> Tensor | None:
        """What the kernels add, minimums or -(zero point · scale), [out, groups] in float32."""
        if self.minimums is not None:
            return self.minimums
        return None if self.zeros is None else -(self.zeros * self.scales)

    def floats(self) -> Tensor:
        """Return what the numbers stand for, in float32 [out, in]."""
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
    """A QuantizedWeight of this `shape` without minimums, whose numbers are unpacked some outputs at once:
    `numbers(first, last)` returns those of outputs from `first` to before `last`, [last - first, in]. It may
    raise CheckpointError for numbers that the format does not have."""

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
        """Return the weight with the numbers of no inputs."""
        none = torch.empty(self.shape[0], 0, dtype=torch.uint8)
        return QuantizedWeight(self.format, none, self.scales, self.zeros, order=self.order)


class NotFinite(Exception):
    """A stored weight has numbers that are not finite, as they are or in the dtype that they are to have."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight [out, in] as a checkpoint has it, in `parts` of one dtype and the same inputs, whose rows are
    contiguous; they may be views of a file. It is to be packed in `dtype` or, with a `format`, rounded."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    format: WeightFormat | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]


@dataclass(frozen=True)
class BlockRows:
    """Rows of a weight in GGUF's `blocks` of the type `kind` (gguf/blocks.py), [rows, bytes of a row], which
    may be a view of a file. With an `order` row i of the weight is row order[i] of the blocks."""

    kind: str
    blocks: NDArray[np.uint8]
    order: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class BlockWeight:
    """A weight [out, in] in GGUF's blocks, in `parts` of the same number of inputs. It is to be packed in
    `format`, which holds all of them."""

    parts: tuple[BlockRows, ...]
    inputs: int
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(len(part.blocks) for part in self.parts), self.inputs


def looked_up(table: Table, indices: Tensor) -> Tensor:
    """Return the numbers (int8) that indices (uint8) have in a table."""
    return torch.tensor(TABLES[table], dtype=torch.int8)[indices.int()]


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return weights of one format, of the same inputs in the same order, as one: their outputs one weight
    after the other."""
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
    """Return striped weights of one format, of the same inputs in the same order, as one: their outputs one
    weight after the other."""
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
    """Return the format with the fewest bits and the largest group in which `widen` writes weights of all
    these, which are integers, or indices of tables, whose groups divide each other."""
    mixed = len({format.symmetric for format in formats}) > 1
    tables = {format.table for format in formats}
    return WeightFormat(
        8 if len(tables) > 1 else max(format.bits for format in formats),
        min(format.group or MAX_INPUTS for format in formats),
        all(format.symmetric for format in formats),
        precise=mixed or any(format.precise for format in formats),
        table=tables.pop() if len(tables) == 1 else None,
    )


def widen(weight: QuantizedWeight, format: WeightFormat) -> QuantizedWeight:
    """Return a weight of integers without zero points, its inputs in order, in a format with as many or more
    bits, groups of as many or fewer inputs and, perhaps, minimums. The integers are the same but for a
    constant, and indices are those of the same table, or become integers of 8 bits."""
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
    """Return `weight` [out, in] rounded to `format`. Scales are numbers of bfloat16, so that every checkpoint
    format holds them exactly."""
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
    """Return scales [out, groups] and numbers [out, groups, group]."""
    largest = middle - 1
    scales = _storable(grouped.abs().amax(2) / largest)
    numbers = (grouped / _divisor(scales)[:, :, None]).round_().clamp_(-largest, largest) + middle
    return scales, numbers.to(torch.uint8)


def _round_to_floats(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [out, groups] and the bits of numbers [out, groups, group]."""
    scales = _storable(grouped.abs().amax(2) / LARGEST_FLOAT)
    numbers = (grouped / _divisor(scales)[:, :, None]).clamp_(-LARGEST_FLOAT, LARGEST_FLOAT)
    return scales, numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def _round_with_zeros(grouped: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales [out, groups], numbers [out, groups, group] and zero points [out, groups]. Zero is a
    number of every group."""
    low, high = grouped.amin(2, keepdim=True).clamp_(max=0), grouped.amax(2, keepdim=True).clamp_(min=0)
    best = _round_range(grouped, low, high, largest)
    for part in SHRINK:
        other = _round_range(grouped, low * part, high * part, largest)
        better = other[0] < best[0]
        best = [torch.where(better, new, old) for new, old in zip(other, best, strict=True)]
    _, scales, zeros, numbers = best
    return scales[:, :, 0], numbers.to(torch.uint8), zeros[:, :, 0].to(torch.uint8)


def _round_range(grouped: Tensor, low: Tensor, high: Tensor, largest: int) -> list[Tensor]:
    """Return squared errors, scales and zero points [out, groups, 1] and numbers [out, groups, group] that
    represent the range from `low` to `high` [out, groups, 1]."""
    scales = _storable(high / largest - low / largest)
    divisor = _divisor(scales)
    zeros = (low / -divisor).round_().clamp_(0, largest)
    numbers = (grouped / divisor).round_().add_(zeros).clamp_(0, largest)
    errors = (numbers - zeros).mul_(scales).sub_(grouped).square_()
    return [_sum(errors), scales, zeros, numbers]


def _sum(values: Tensor) -> Tensor:
    """Return sums over the last dimension, added in the same order on every processor."""
    while values.shape[-1] > 1:
        half = -(-values.shape[-1] // 2)
        first, second = values[..., :half], values[..., half:]
        values = first + torch.nn.functional.pad(second, (0, half - second.shape[-1]))
    return values


def _storable(scales: Tensor) -> Tensor:
    return scales.bfloat16().float()


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)
