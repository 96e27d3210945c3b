"""Weights as the device's matrix products read them: floats, or numbers of 8 or 4 bits with their tables.

    8 bits   word b of 2 · part inputs holds inputs b and part + b, from the lowest bits up
    4 bits   word b of 4 · part inputs holds inputs b, part + b, 2 · part + b and 3 · part + b
    tables   scales and offsets [out, groups]: the groups of an output lie next to each other, so that those
             of a word's parts are loaded at once

Words have 16 bits, as bfloat16 has: two words in a register become two weights by one mask. The numbers of
`part` inputs are multiplied at once; they share a scale. The inputs of a group are a power of two: groups of
another size are divided, and an output with one scale is one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from streamserve.execution.quantization import TABLES, QuantizedWeight, WeightFormat

MAX_PART = 64
MIN_PART = 16
"""Inputs that the tensor cores multiply at least."""

E8M0_SHIFT = 23
"""The bits of a float32's exponent start here: a scale of 8 bits is an exponent."""


class Kind(IntEnum):
    """What the numbers of a weight are."""

    FLOATS = 0
    INTEGERS = 1
    E4M3 = 2
    MXFP4 = 3
    IQ4 = 4


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in], or the weights [experts, out, in] of several experts. `numbers` […, out, in] are
    floats, or bytes [..., out, bytes] with finite `scales` […, out, groups] in a type that holds them
    exactly, uint8 for powers of two, and perhaps `offsets` of the same shape: zero points (uint8) or minimums
    (float32). `middle` is the integer that stands for zero without either. With an `order` [in] (int32) of
    the inputs, column c of the numbers is that of input order[c]."""

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
        """Inputs that are multiplied at once."""
        return MAX_PART if self.kind == Kind.FLOATS else part_of(self.group)

    @property
    def parts(self) -> int:
        """Numbers in a word of 16 bits."""
        return 16 // self.bits

    @property
    def run(self) -> int:
        """Parts of a word that share a scale."""
        return min(self.parts, self.group // self.part) if self.group else 1

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        tables = (self.numbers, self.scales, self.offsets, self.order)
        return sum(table.nbytes for table in tables if table is not None)


def part_of(group: int) -> int:
    """Return how many inputs of a group are multiplied at once: the largest power of two that divides it, up
    to MAX_PART."""
    return min(MAX_PART, group & -group)


def packs(format: WeightFormat) -> bool:
    """Return whether weights of this format can be packed."""
    return format.group is None or part_of(format.group) >= MIN_PART


def pack(weight: QuantizedWeight, device: torch.device) -> PackedWeight:
    """Return a quantized weight on `device`. Raises ValueError for groups of a size that cannot be packed."""
    format, inputs = weight.format, weight.numbers.shape[1]
    if not packs(format):
        raise ValueError(f"groups of {format.group} inputs cannot be packed")
    given = format.group or max(MAX_PART, 1 << (inputs - 1).bit_length())
    group = given & -given
    part, parts = part_of(group), 16 // format.bits
    numbers = pad(weight.numbers.to(device), (0, -inputs % (part * parts)))
    groups = -(-numbers.shape[1] // group)  # a multiple of those of a word
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
    """Return scales in fewer bits where these hold them exactly."""
    if format.table == "mxfp4":
        exponents = (scales.contiguous().view(torch.int32) >> E8M0_SHIFT).to(torch.uint8)
        return exponents if torch.equal(widened(exponents), scales) else scales
    for dtype in () if format.wide_tables else (torch.bfloat16, torch.float16):
        short = scales.to(dtype)
        if torch.equal(short.float(), scales):
            return short
    return scales


def widened(scales: Tensor) -> Tensor:
    """Return scales in float32."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.int32) << E8M0_SHIFT).view(torch.float32)
    return scales.float()


def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return the weights of several experts, which have one format and no order, as one. Raises ValueError
    for others."""
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
    """Return what the numbers stand for, in float32 […, out, in]."""
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
