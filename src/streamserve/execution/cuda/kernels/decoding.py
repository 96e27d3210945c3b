"""What packed numbers stand for, in registers: words of 16 bits become bfloat16 or float32 (packing.py)."""
# mypy: ignore-errors

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.cuda.packing import Kind
from streamserve.execution.quantization import TABLES

FLOATS = tl.constexpr(int(Kind.FLOATS))
INTEGERS = tl.constexpr(int(Kind.INTEGERS))
E4M3 = tl.constexpr(int(Kind.E4M3))
MXFP4 = tl.constexpr(int(Kind.MXFP4))


def _masks(shifts: tuple[int, ...], body: str) -> tuple[str, ...]:
    """Return the PTX that decodes each part of two words $1: `body` finds it in `word`, shifted right (left
    for a negative shift). In it, lop3 with 0xEA is (a & b) | c, with 0x6A (a & b) ^ c: the compiler does not
    join two instructions to one."""
    moves = [
        f"shr.b32 word, $1, {shift};" if shift >= 0 else f"shl.b32 word, $1, {-shift};" for shift in shifts
    ]
    registers = ".reg .b32 word, other, factor;"
    return tuple(f"{{ {registers} {move} {body} }}" for move in moves)


FOUR_INTEGERS = _masks(
    (0, 4, 8, 12),
    """mov.b32 other, 0x43004300;
    lop3.b32 word, word, 0x000F000F, other, 0xEA;
    mov.b32 factor, 0x3F803F80;
    fma.rn.bf16x2 $0, word, factor, $2;""",
)
"""Integers n of 4 bits, less $2 + 128: the bits 0x4300 | n are 128 + n in bfloat16, to which $2 is added."""

TWO_INTEGERS = _masks(
    (0, 8),
    """mov.b32 factor, 0x43804380;
    lop3.b32 other, word, 0x00800080, factor, 0x6A;
    mov.b32 factor, 0x43004300;
    lop3.b32 word, word, 0x007F007F, factor, 0xEA;
    mov.b32 factor, 0xBF80BF80;
    fma.rn.bf16x2 word, other, factor, word;
    mov.b32 factor, 0x3F803F80;
    fma.rn.bf16x2 $0, word, factor, $2;""",
)
"""Integers n of 8 bits, less 128, to which $2 is added: the low 7 bits as 128 + n, less 128 (the bits 0x4300)
if the high bit is set, less 256 (0x4380) if it is not."""

FLOATS_OF_8 = _masks(
    (-8, 0),
    """and.b32 other, word, 0x80008000;
    shr.b32 word, word, 4;
    lop3.b32 word, word, 0x07F007F0, other, 0xEA;
    mov.b32 factor, 0x7B807B80;
    mov.b32 other, 0x80008000;
    fma.rn.bf16x2 $0, word, factor, other;""",
)
"""Floats of 8 bits: shifted, their bits are bfloat16 with an exponent that is less by 120."""

FLOATS_OF_4 = _masks(
    (-12, -8, -4, 0),
    """and.b32 other, word, 0x80008000;
    shr.b32 word, word, 6;
    lop3.b32 word, word, 0x01C001C0, other, 0xEA;
    mov.b32 factor, 0x7F007F00;
    mov.b32 other, 0x80008000;
    fma.rn.bf16x2 $0, word, factor, other;""",
)
"""Floats of 4 bits, doubled: as FLOATS_OF_8, with an exponent that is less by 127."""


@triton.constexpr_function
def _choose_masks(kind: int, bits: int) -> tuple[str, ...]:
    if kind == INTEGERS:
        return FOUR_INTEGERS if bits == 4 else TWO_INTEGERS
    return FLOATS_OF_4 if bits == 4 else FLOATS_OF_8


@triton.jit
def decode(numbers, table, KIND: tl.constexpr, BITS: tl.constexpr):
    """Return what `numbers` (int32) of BITS stand for with a scale of 1, in float32: integers less the middle
    of their range, indices of `table`."""
    if KIND == E4M3:  # exponents of float32 are larger by 120
        bits = ((numbers & 0x80) << 24) | ((numbers & 0x7F) << 20)
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif KIND == MXFP4:  # doubled, and exponents of float32 are larger by 126
        bits = ((numbers & 8) << 28) | ((numbers & 7) << 22)
        values = bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38
    elif KIND == INTEGERS:
        values = (numbers - (1 << (BITS - 1))).to(tl.float32)
    else:
        values = tl.load(table + numbers)
    return values


@triton.jit
def decode_part(
    words, table, zeros, KIND: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Return what part NUMBER of `words` (int16) stands for, as `decode`, but integers less `zeros`, which
    are spread to the shape of the words. PAIRS: two words at a time, in bfloat16, by code that has one result
    for each part, so that words are moved to the tensor cores' layout, not results."""
    if PAIRS:
        EVERY: tl.constexpr = _choose_masks(KIND, BITS)
        added = tl.full([1, 1], 0.0, tl.bfloat16)
        if KIND == INTEGERS:  # integers of up to 8 bits, exact in bfloat16
            added = ((-128.0 if BITS == 4 else 128.0) - zeros.to(tl.float32)).to(tl.bfloat16)
        added = tl.broadcast_to(added, words.shape)
        values = tl.inline_asm_elementwise(EVERY[NUMBER], "=r,r,r", [words, added], tl.bfloat16, True, 2)
    else:
        values = decode((words.to(tl.int32) >> (BITS * NUMBER)) & ((1 << BITS) - 1), table, KIND, BITS)
        if KIND == INTEGERS:
            values += (1 << (BITS - 1)) - zeros.to(tl.float32)
    return values


@triton.jit
def widen(scales):
    """Return scales in float32: those of 8 bits are exponents."""
    if scales.dtype == tl.uint8:
        wide = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        wide = scales.to(tl.float32)
    return wide


@lru_cache
def iq4_table(device: torch.device) -> Tensor:
    """Return the numbers that indices of IQ4 stand for, in float32."""
    return torch.tensor(TABLES["iq4"], dtype=torch.float32, device=device)
