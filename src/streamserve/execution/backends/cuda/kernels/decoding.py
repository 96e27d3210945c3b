"""Decode packed numbers in registers: words of 16 bits (packing.py) become bfloat16 or float32."""
# mypy: ignore-errors

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.backends.cuda.packing import Kind
from streamserve.execution.formats.quantization import TABLES

FLOATS = tl.constexpr(int(Kind.FLOATS))
INTEGERS = tl.constexpr(int(Kind.INTEGERS))
E4M3 = tl.constexpr(int(Kind.E4M3))
MXFP4 = tl.constexpr(int(Kind.MXFP4))


def _masks(shifts: tuple[int, ...], body: str) -> tuple[str, ...]:
    """Return the PTX code that decodes each part of the two words $1. `body` finds the part in `word`,
    shifted right by the part's shift (left if negative). It uses lop3 with 0xEA for (a & b) | c and with 0x6A
    for (a & b) ^ c, because the compiler does not join two such instructions."""
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
"""Code for integers n of 4 bits: it returns 128 + n + $2. The bits 0x4300 | n are 128 + n in bfloat16."""

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
"""Code for integers n of 8 bits: it returns n - 128 + $2. The low 7 bits m become 128 + m in bfloat16, from
which 128 (the bits 0x4300) is subtracted if the high bit is set, and 256 (0x4380) if it is not."""

FLOATS_OF_8 = _masks(
    (-8, 0),
    """and.b32 other, word, 0x80008000;
    shr.b32 word, word, 4;
    lop3.b32 word, word, 0x07F007F0, other, 0xEA;
    mov.b32 factor, 0x7B807B80;
    mov.b32 other, 0x80008000;
    fma.rn.bf16x2 $0, word, factor, other;""",
)
"""Code for floats of 8 bits (e4m3). Shifted, their bits are bfloat16 with an exponent that is 120 too small;
a product with 2^120 corrects it."""

FLOATS_OF_4 = _masks(
    (-12, -8, -4, 0),
    """and.b32 other, word, 0x80008000;
    shr.b32 word, word, 6;
    lop3.b32 word, word, 0x01C001C0, other, 0xEA;
    mov.b32 factor, 0x7F007F00;
    mov.b32 other, 0x80008000;
    fma.rn.bf16x2 $0, word, factor, other;""",
)
"""Code for twice the value of floats of 4 bits (e2m1), as FLOATS_OF_8 with a factor of 2^127."""


@triton.constexpr_function
def _choose_masks(kind: int, bits: int) -> tuple[str, ...]:
    if kind == INTEGERS:
        return FOUR_INTEGERS if bits == 4 else TWO_INTEGERS
    return FLOATS_OF_4 if bits == 4 else FLOATS_OF_8


@triton.jit
def decode(numbers, table, KIND: tl.constexpr, BITS: tl.constexpr):
    """Return the float32 values of `numbers` (int32) of BITS bits with a scale of 1. Integers are reduced by
    the middle of their range; IQ4 numbers are indices of `table`."""
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
    """Return the values of part NUMBER of `words` (int16), as `decode` does, except that integers are reduced
    by `zeros`, which are broadcast to the shape of the words. With PAIRS two words are decoded at a time, to
    bfloat16. The code has one result for each part, so that the words, not the results, are moved to the
    tensor cores' layout."""
    if PAIRS:
        EVERY: tl.constexpr = _choose_masks(KIND, BITS)
        added = tl.full([1, 1], 0.0, tl.bfloat16)
        if KIND == INTEGERS:  # the sums are integers of up to 8 bits, which bfloat16 represents exactly
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
    """Return `scales` in float32. Scales of 8 bits are exponents."""
    if scales.dtype == tl.uint8:
        wide = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        wide = scales.to(tl.float32)
    return wide


@lru_cache
def iq4_table(device: torch.device) -> Tensor:
    """Return the table of IQ4 in float32."""
    return torch.tensor(TABLES["iq4"], dtype=torch.float32, device=device)
