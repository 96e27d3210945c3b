"""Pack weights for the device's matrix products: floats, or numbers of 8 or 4 bits with their tables.

    8 bits   word b of 2 · part inputs contains inputs b and part + b, from the lowest bits up
    4 bits   word b of 4 · part inputs contains inputs b, part + b, 2 · part + b and 3 · part + b
    tables   scales and offsets [out, groups]: the groups of an output are adjacent, so that one load gets
             the tables of all parts of a word

Words have 16 bits like bfloat16, so that one mask makes two weights of two words in a register. The numbers
of `part` inputs are multiplied together and share a scale. The size of a group is a power of two: groups of
other sizes are divided, and an output with one scale is one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from streamserve.execution.formats.quantization import TABLES, QuantizedWeight, WeightFormat

MAX_PART = 64
MIN_PART = 16
"""Minimum number of inputs that the tensor cores multiply together."""

E8M0_SHIFT = 23
"""Position of the exponent in the bits of a float32. A scale of 8 bits is such an exponent."""


class Kind(IntEnum):
    """The kind of a weight's numbers."""

    FLOATS = 0
    INTEGERS = 1
    E4M3 = 2
    MXFP4 = 3
    IQ4 = 4


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in], or the weights [experts, out, in] of several experts.

    * `numbers`: floats […, out, in], or bytes […, out, bytes].
    * `scales` […, out, groups]: finite, in a type that represents them exactly; uint8 for powers of two.
    * `offsets` […, out, groups]: zero points (uint8) or minimums (float32). Without offsets, `middle` is the
      integer for zero.
    * `order` [in] (int32): column c of the numbers belongs to input order[c]; None: inputs are in order.
    """

    kind: Kind
    numbers: Tensor
    inputs: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None
    bits: int = 16
    group: int = 0
    middle: int = 0

    @property
    def outputs(self) -> int:
        return self.numbers.shape[-2]

    @property
    def part(self) -> int:
        """Number of inputs that are multiplied together."""
        return MAX_PART if self.kind == Kind.FLOATS else part_of(self.group)

    @property
    def parts(self) -> int:
        """Number of parts: numbers in a word of 16 bits."""
        return 16 // self.bits

    @property
    def run(self) -> int:
        """Number of parts of a word that share a scale."""
        return min(self.parts, self.group // self.part) if self.group else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tables = (self.numbers, self.scales, self.offsets, self.order)
        return sum(table.nbytes for table in tables if table is not None)


def part_of(group: int) -> int:
    """Return the number of inputs of a group that are multiplied together: the largest power of two that
    divides the group's size, up to MAX_PART."""
    return min(MAX_PART, group & -group)


def packs(format: WeightFormat) -> bool:
    """Return whether weights of this format can be packed."""
    return format.group is None or part_of(format.group) >= MIN_PART


def pack(weight: QuantizedWeight, device: torch.device) -> PackedWeight:
    """Return a quantized weight packed on `device`. Raises ValueError for groups of a size that cannot be
    packed."""
    format, inputs = weight.format, weight.numbers.shape[1]
    if not packs(format):
        raise ValueError(f"groups of {format.group} inputs cannot be packed")
    given = format.group or max(MAX_PART, 1 << (inputs - 1).bit_length())
    group = given & -given
    part, parts = part_of(group), 16 // format.bits
    numbers = pad(weight.numbers.to(device), (0, -inputs % (part * parts)))
    groups = -(-numbers.shape[1] // group)  # inputs are padded to whole words
    numbers = numbers.view(len(numbers), -1, parts, part).mT
    if format.bits == 4:
        numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
    numbers = numbers.flatten(1).contiguous()

    def table(values: Tensor) -> Tensor:
        values = values.repeat_interleave(given // group, 1)[:, :groups]
        return pad(values, (0, groups - values.shape[1])).contiguous().to(device)

    offsets = weight.minimums if weight.zeros is None else weight.zeros
    kind = Kind.E4M3 if format.floating else Kind.INTEGERS
    return PackedWeight(
        kind=Kind[format.table.upper()] if format.table else kind,
        numbers=numbers,
        inputs=inputs,
        scales=table(_shortened(weight.scales, format)),
        offsets=None if offsets is None else table(offsets),
        order=None if weight.order is None else weight.order.to(device, torch.int32),
        bits=format.bits,
        group=group,
        middle=format.middle if format.symmetric else 0,
    )


def _shortened(scales: Tensor, format: WeightFormat) -> Tensor:
    """Return `scales` in fewer bits, if these represent them exactly."""
    if format.table == "mxfp4":
        exponents = (scales.contiguous().view(torch.int32) >> E8M0_SHIFT).to(torch.uint8)
        return exponents if torch.equal(widened(exponents), scales) else scales
    for dtype in () if format.wide_tables else (torch.bfloat16, torch.float16):
        short = scales.to(dtype)
        if torch.equal(short.float(), scales):
            return short
    return scales


def widened(scales: Tensor) -> Tensor:
    """Return `scales` in float32."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.int32) << E8M0_SHIFT).view(torch.float32)
    return scales.float()


def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return the weights of several experts as one. Raises ValueError unless they have one format and no
    order."""
    first = weights[0]
    if any(weight.order is not None for weight in weights):
        raise ValueError("experts whose inputs have an order cannot be stacked")
    if len({(w.kind, w.bits, w.group, w.middle, w.numbers.shape, w.offsets is None) for w in weights}) > 1:
        raise ValueError("experts of different formats cannot be stacked")
    scales = [weight.scales for weight in weights if weight.scales is not None]
    if len({values.dtype for values in scales}) > 1:
        scales = [widened(values) for values in scales]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return replace(
        first,
        numbers=torch.stack([weight.numbers for weight in weights]),
        scales=torch.stack(scales) if scales else None,
        offsets=torch.stack(offsets) if offsets else None,
    )


def unpack(weight: PackedWeight) -> Tensor:
    """Return the weights that the numbers stand for, […, out, in] in float32."""
    numbers = weight.numbers
    if weight.kind == Kind.FLOATS or weight.scales is None:
        return numbers.float()
    if weight.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)
    chunks = numbers.reshape(*numbers.shape[:-1], -1, weight.part, weight.parts)
    numbers = chunks.mT.flatten(-3)[..., : weight.inputs]

    def spread(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(weight.group, -1)[..., : weight.inputs]

    scales = spread(widened(weight.scales))
    if weight.kind == Kind.E4M3:
        columns = scales * numbers.contiguous().view(torch.float8_e4m3fn).float()
    elif weight.kind != Kind.INTEGERS:
        table = TABLES["mxfp4" if weight.kind == Kind.MXFP4 else "iq4"]
        columns = scales * torch.tensor(table, device=numbers.device).float()[numbers.int()]
    elif weight.offsets is None:
        columns = scales * (numbers.float() - weight.middle)
    elif weight.offsets.dtype == torch.uint8:
        columns = scales * (numbers.float() - spread(weight.offsets))
    else:
        columns = scales * numbers.float() + spread(weight.offsets)
    return columns if weight.order is None else columns[..., weight.order.long().argsort()]
