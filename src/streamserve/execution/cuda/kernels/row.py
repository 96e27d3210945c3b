"""The product of one row with packed weights, by multiply-adds in float32: no tensor cores, no shared memory.

a warp          some columns; its lanes read 16 bytes each, next to each other, of a column's words
in registers    a number n at bits 16 to 19 (8 bits: 15 to 22) of the bits of 128 is 128 + n (256 + n)
acc += scale · (sum of (128 + n) · x - (128 + zero point) · sum of x)
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.cuda.kernels.decoding import INTEGERS, decode, widen
from streamserve.execution.cuda.kernels.example import KernelExample
from streamserve.execution.cuda.packing import Kind, PackedWeight

LANES = 32
"""Lanes of a warp."""


@triton.jit
def _number(words, PLACE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, table, MASKS: tl.constexpr):
    """Return the numbers at bit PLACE of `words` (int32) in float32: integers plus 128 (4 bits) or 256."""
    if KIND == INTEGERS:
        MASK: tl.constexpr = 0x000F0000 if BITS == 4 else 0x007F8000
        ONE: tl.constexpr = 0x43000000 if BITS == 4 else 0x43800000
        TO: tl.constexpr = 16 if BITS == 4 else 15
        moved = words >> (PLACE - TO) if PLACE >= TO else words << (TO - PLACE)
        if MASKS:
            number = tl.inline_asm_elementwise(  # (moved & MASK) | ONE as one instruction
                "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,n,r", [moved, MASK, ONE], tl.float32, True, 1
            )
        else:
            number = ((moved & MASK) | ONE).to(tl.float32, bitcast=True)
    else:
        number = decode((words >> PLACE) & ((1 << BITS) - 1), table, KIND, BITS)
    return number


@triton.jit
def _multiply_row(
    x, numbers, scales, offsets, bias, table, out,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    MINIMUMS: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr,
    STAGES: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """Multiply `x` [K] (bfloat16, as pairs in int32) by a range of columns of `numbers` [N, WORDS] (pairs of
    words in int32)."""
    BITS: tl.constexpr = 16 // PARTS
    BASE: tl.constexpr = 128 if BITS == 4 else 256
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    CHUNK: tl.constexpr = PART * PARTS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = ((column < N) | (N % COLUMNS == 0))[None, :]
    thread = tl.arange(0, THREADS)
    own = numbers + column.to(tl.int64)[None, None, :] * WORDS
    tables = column[None, :] * GROUPS
    acc = tl.zeros([THREADS, COLUMNS], tl.float32)
    STEPS: tl.constexpr = (WORDS + 4 * THREADS - 1) // (4 * THREADS)
    WHOLE: tl.constexpr = WORDS % (4 * THREADS) == 0
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (step * THREADS + thread) * 4  # of the thread's four pairs of words
        inside = (first < WORDS) | WHOLE
        loaded = inside[:, None] & exists
        word = tl.arange(0, 4)[:, None] + first[None, :]
        words = tl.load(own + word[:, :, None], loaded[None, :, :], 0)
        key = first // (PART // 2) * CHUNK + 2 * (first % (PART // 2))  # the first word's input of part 0
        key = tl.multiple_of(key, 8)
        product = tl.zeros([4, THREADS, COLUMNS], tl.float32)
        total = tl.zeros([4, THREADS], tl.float32)
        for part in tl.static_range(PARTS):
            pair = key[None, :] // 2 + part * (PART // 2) + tl.arange(0, 4)[:, None]
            known = (inside & (key + part * PART < K)) | (WHOLE and K % CHUNK == 0)
            both = tl.load(x + pair, known[None, :], 0)
            low = (both << 16).to(tl.float32, bitcast=True)
            high = (both & -65536).to(tl.float32, bitcast=True)
            product += _number(words, BITS * part, BITS, KIND, table, MASKS) * low[:, :, None]
            product += _number(words, 16 + BITS * part, BITS, KIND, table, MASKS) * high[:, :, None]
            total += low + high
            if part % RUN == RUN - 1:
                group = tables + tl.minimum((key + part * PART) // GROUP, GROUPS - 1)[:, None]
                scale = widen(tl.load(scales + group, loaded, 0))
                sums = tl.sum(total, 0)[:, None]
                result = tl.sum(product, 0)
                if ZEROS:
                    result -= (BASE + tl.load(offsets + group, loaded, 0).to(tl.float32)) * sums
                elif MINIMUMS:
                    result -= BASE * sums
                    acc += tl.load(offsets + group, loaded, 0) * sums
                elif KIND == INTEGERS:
                    result -= (BASE + MIDDLE) * sums
                acc += scale * result
                product = tl.zeros([4, THREADS, COLUMNS], tl.float32)
                total = tl.zeros([4, THREADS], tl.float32)
    outputs = tl.sum(acc, 0)
    live = (column < N) | (N % COLUMNS == 0)
    if BIAS:
        outputs += tl.load(bias + column, live, 0.0).to(tl.float32)
    tl.store(out + column, outputs.to(out.dtype.element_ty), live)


def multiplies_row(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether `multiply_row` multiplies `x`."""
    return len(x) == 1 and x.dtype == torch.bfloat16 and weight.inputs % 2 == 0 and weight.kind != Kind.IQ4


def multiply_row(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply one row `x` [1, in] of bfloat16, as plain.matrix.multiply."""
    out = torch.empty(1, weight.outputs, dtype=dtype, device=x.device)
    launch_row(x, weight, bias, out, *choose_row_launch(weight))
    return out


def choose_row_launch(weight: PackedWeight) -> tuple[int, int, int]:
    """Return columns, warps and stages of a program."""
    return (8, 4, 1)


def launch_row(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, columns: int, warps: int, stages: int
) -> None:
    """Write the product of one row to `out` [1, out]."""
    offsets = weight.offsets
    zeros = offsets is not None and offsets.dtype == torch.uint8
    pairs = x.contiguous().view(torch.int32)
    _multiply_row[(triton.cdiv(weight.outputs, columns),)](
        pairs, weight.numbers.view(torch.int32), weight.scales, pairs if offsets is None else offsets,
        pairs if bias is None else bias, pairs, out,
        N=weight.outputs, K=weight.inputs, WORDS=weight.numbers.shape[-1] // 4, GROUP=weight.group,
        GROUPS=weight.scales.shape[-1], PART=weight.part, PARTS=weight.parts, RUN=weight.run,
        KIND=int(weight.kind), ZEROS=zeros, MINIMUMS=offsets is not None and not zeros,
        BIAS=bias is not None, COLUMNS=columns, THREADS=LANES * warps, STAGES=stages,
        MASKS=not triton.knobs.runtime.interpret, num_warps=warps,
    )  # fmt: skip


def examples(capability: int) -> list[KernelExample]:
    """Return the launches of a matrix of 4096 x 4096."""
    del capability
    pointers = {"x": "*i32", "numbers": "*i32", "scales": "*bf16", "offsets": "*u8", "bias": "*bf16"}
    pointers |= {"table": "*fp32", "out": "*bf16"}
    fixed = {
        "N": 4096, "K": 4096, "WORDS": 512, "GROUP": 128, "GROUPS": 32, "PART": 64, "PARTS": 4, "RUN": 2,
        "KIND": int(Kind.INTEGERS), "ZEROS": False, "MINIMUMS": False, "BIAS": False, "COLUMNS": 8,
        "THREADS": 4 * LANES, "STAGES": 1, "MASKS": True,
    }  # fmt: skip
    kinds = {
        "4 bits": {"ZEROS": True},
        "4 bits, minimums": {"MINIMUMS": True, "PART": 32, "GROUP": 32, "GROUPS": 128, "RUN": 1},
        "8 bits": {"PARTS": 2, "WORDS": 1024},
        "fp8": {"PARTS": 2, "WORDS": 1024, "KIND": int(Kind.E4M3)},
        "mxfp4": {"PART": 32, "GROUP": 32, "GROUPS": 128, "RUN": 1, "KIND": int(Kind.MXFP4)},
    }
    launches = []
    for name, options in kinds.items():
        constants = fixed | options
        signature = pointers | dict.fromkeys(constants, "constexpr")
        signature |= {"offsets": "*fp32"} if constants["MINIMUMS"] else {}
        launches.append(KernelExample(f"multiply a row, {name}", _multiply_row, signature, constants, 4))
    return launches
