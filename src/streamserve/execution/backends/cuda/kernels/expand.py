"""Products of many rows with packed weights: a range of outputs is expanded to floats, the device's library
multiplies it, and the next range overwrites it.

The expanded weights are rounded to the dtype of the rows, after scaling. (Products of few rows do not round
weights.)
"""
# mypy: ignore-errors

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.backends.cuda.kernels.decoding import decode_part, iq4_table, widen
from streamserve.execution.backends.cuda.packing import Kind, PackedWeight

SCRATCH_BYTES = 64 << 20
"""Bytes for the floats of a range of outputs. All products of a device share the memory: they run in one
stream."""

COLUMNS = 16
"""Number of outputs that a program writes."""


@triton.jit
def _expand(
    numbers, scales, offsets, table, out, first, outputs,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile of the packed weight into `out` [outputs, K]: one chunk of inputs of COLUMNS outputs.
    Row 0 of `out` is the weight's output `first`."""
    BITS: tl.constexpr = 16 // PARTS
    chunk = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (column < outputs)[:, None]
    source = (first + column).to(tl.int64)[:, None]
    part = tl.arange(0, PART)[None, :]
    words = tl.load(numbers + source * WORDS + chunk * PART + part, exists, 0)
    for number in tl.static_range(PARTS):
        start = (chunk * PARTS + number) * PART
        group = source * GROUPS + tl.minimum(start // GROUP, GROUPS - 1)
        scale = widen(tl.load(scales + group, exists, 0))
        zero = tl.full([1, 1], 0 if MINIMUMS else 1 << (BITS - 1), tl.int32)
        if ZEROS:
            zero = tl.load(offsets + group, exists, 0)
        values = decode_part(words, table, zero, KIND, BITS, number, PAIRS).to(tl.float32)
        values *= scale
        if MINIMUMS:
            values += tl.load(offsets + group, exists, 0)
        key = start + part
        kept = exists & ((key < K) | (K % (PART * PARTS) == 0))
        tl.store(out + column.to(tl.int64)[:, None] * K + key, values.to(out.dtype.element_ty), kept)


def expand(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Write the floats of the weight's outputs from `first` on to `out` [outputs, in]."""
    offsets = weight.offsets
    zeros = offsets is not None and offsets.dtype == torch.uint8
    words = weight.numbers.view(torch.int16)
    chunk = weight.part * weight.parts
    pairs = not triton.knobs.runtime.interpret and weight.kind != Kind.IQ4
    _expand[(triton.cdiv(len(out), COLUMNS), triton.cdiv(weight.inputs, chunk))](
        words, weight.scales, words if offsets is None else offsets, iq4_table(out.device), out, first,
        len(out),
        K=weight.inputs, WORDS=words.shape[-1], GROUP=weight.group, GROUPS=weight.scales.shape[-1],
        PART=weight.part, PARTS=weight.parts, KIND=int(weight.kind), ZEROS=zeros,
        MINIMUMS=offsets is not None and not zeros, PAIRS=pairs, COLUMNS=COLUMNS,
    )  # fmt: skip


def multiply_expanded(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply many rows. See `plain.matrix.multiply`."""
    scratch = scratch_of(x.device).view(x.dtype)
    count = max(1, len(scratch) // weight.inputs)
    if count < weight.outputs:
        count = 1 << (count.bit_length() - 1)  # a power of two: whole tiles of the library
    out = torch.empty(len(x), weight.outputs, dtype=dtype, device=x.device)
    for first in range(0, weight.outputs, count):
        columns = out[:, first : first + count]
        floats = scratch[: columns.shape[1] * weight.inputs].view(-1, weight.inputs)
        expand(weight, first, floats)
        own = None if bias is None else bias[first : first + count]
        if dtype != x.dtype:
            columns.copy_(_multiply_wide(x, floats))
            if own is not None:
                columns += own
        elif own is None:
            torch.mm(x, floats.T, out=columns)
        else:
            torch.addmm(own, x, floats.T, out=columns)
    return out


def _multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` times the transposed `weight`, in float32."""
    if x.device.type == "cpu":
        return x.float() @ weight.float().T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


@lru_cache
def scratch_of(device: torch.device) -> Tensor:
    """Return the device's scratch memory for expanded weights. It must be allocated before a graph is
    captured (kernels/matrix.py: prepare)."""
    return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
