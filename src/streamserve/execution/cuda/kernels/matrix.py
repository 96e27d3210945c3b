"""Products with packed weights as one Triton kernel: of all rows, or of the experts that each row chose.

    for each chunk of the inputs:    bytes of 8-bit numbers, or of two parts of 4-bit numbers
      for each part of it:           numbers (exact in bfloat16) · x on the tensor cores, in float32
        acc += scale · product       and minimum · sum of x

The numbers are not scaled before they are multiplied, so the weights are as exact as the numbers are.
"""
# mypy: ignore-errors

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.cuda.kernels.example import KernelExample
from streamserve.execution.cuda.packing import Kind, PackedWeight
from streamserve.execution.cuda.routing import Routing, tile_of
from streamserve.execution.quantization import TABLES

FLOATS = tl.constexpr(int(Kind.FLOATS))
INTEGERS = tl.constexpr(int(Kind.INTEGERS))
E4M3 = tl.constexpr(int(Kind.E4M3))
MXFP4 = tl.constexpr(int(Kind.MXFP4))

MAX_SPLITS = 8
"""Parts that the inputs of a product of few rows are divided into, so that it occupies the device."""

ELEMENTS = 1024


@dataclass(frozen=True)
class Launch:
    """Rows and columns of a program, its warps, and steps whose loads are in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def _decode(numbers, zeros, table, KIND: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr):
    """Return what `numbers` [columns, part] (int32) stand for with a scale of 1, in float32."""
    if KIND == E4M3:  # exponents of float32 are larger by 120
        bits = ((numbers & 0x80) << 24) | ((numbers & 0x7F) << 20)
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif KIND == MXFP4:
        size = numbers & 7
        integers = tl.where(size < 4, size, ((size & 1) + 2) << ((size >> 1) - 1))
        values = tl.where(numbers > 7, -integers, integers).to(tl.float32)
    elif KIND == INTEGERS:
        values = (numbers - zeros[:, None]).to(tl.float32) if ZEROS else (numbers - MIDDLE).to(tl.float32)
    else:
        values = tl.load(table + numbers)
    return values


@triton.jit
def _scale(scales):
    """Return scales in float32: those of 8 bits are exponents."""
    if scales.dtype == tl.uint8:
        wide = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        wide = scales.to(tl.float32)
    return wide


@triton.jit
def _table_rows(
    scales, offsets, tables, exists, key,
    N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Return scales and offsets, if there are any, of the group of input number `key`."""
    group = tables + tl.minimum(key // GROUP, GROUPS - 1) * N
    scale = tl.load(scales + group, exists, 0)
    offset = scale
    if OFFSETS:
        offset = tl.load(offsets + group, exists, 0)
    return scale, offset


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, numbers, scales, offsets, bias, table, out, order, experts, firsts, counts, rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PART: tl.constexpr, HALVES: tl.constexpr, KIND: tl.constexpr, MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, BIAS: tl.constexpr, ROUTED: tl.constexpr,
    SHARED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by a range of columns, over the program's share of the inputs. With several
    SPLITS `out` [splits, rows, N] are parts of the results."""
    tile, split = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < N
    lane = tl.arange(0, ROWS)
    expert = tl.program_id(2) * 0
    if ROUTED:
        count = tl.load(counts + tile)
        if count == 0:
            return
        expert = tl.load(experts + tile)
        live = lane < count
        target = tl.load(order + tl.load(firsts + tile) + lane, live, 0)
        source = target // SHARED
    else:
        target = tile * ROWS + lane
        live = target < rows
        source = target
    expert = expert.to(tl.int64)
    part = tl.arange(0, PART)
    vectors = x + source.to(tl.int64)[:, None] * x_stride
    own = numbers + (expert * N + column)[:, None] * BYTES
    tables = expert * GROUPS * N + column
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    CHUNKS: tl.constexpr = (K + PART * HALVES - 1) // (PART * HALVES)
    SHARE: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    chunk_end = tl.minimum(split * SHARE + SHARE, CHUNKS)
    OFFSETS: tl.constexpr = ZEROS or MINIMUMS
    CHUNK: tl.constexpr = PART * HALVES
    TWO: tl.constexpr = HALVES == 2 and GROUP % CHUNK != 0  # the halves have tables of their own
    s0, o0, s1, o1 = exists, exists, exists, exists
    if AHEAD:  # loads so narrow are not pipelined
        s0, o0 = _table_rows(
            scales, offsets, tables, exists, split * SHARE * CHUNK, N, GROUP, GROUPS, OFFSETS
        )
        if TWO:
            after = split * SHARE * CHUNK + PART
            s1, o1 = _table_rows(scales, offsets, tables, exists, after, N, GROUP, GROUPS, OFFSETS)
    n0, q0, n1, q1 = s0, o0, s1, o1
    for chunk in range(split * SHARE, chunk_end):
        if AHEAD:
            after = (chunk + 1) * CHUNK
            n0, q0 = _table_rows(scales, offsets, tables, exists, after, N, GROUP, GROUPS, OFFSETS)
            if TWO:
                after += PART
                n1, q1 = _table_rows(scales, offsets, tables, exists, after, N, GROUP, GROUPS, OFFSETS)
        if KIND != FLOATS:
            packed = tl.load(own + (chunk * PART + part)[None, :], exists[:, None], 0).to(tl.int32)
        for half in tl.static_range(HALVES):
            first = (chunk * HALVES + half) * PART
            key = first + part
            values = tl.load(vectors + key[None, :], live[:, None] & (key < K)[None, :], 0.0)
            if KIND == FLOATS:
                weights = tl.load(own + key[None, :], exists[:, None] & (key < K)[None, :], 0.0)
            else:
                if not AHEAD:
                    scale, offset = _table_rows(
                        scales, offsets, tables, exists, first, N, GROUP, GROUPS, OFFSETS
                    )
                elif TWO and half == 1:
                    scale, offset = s1, o1
                else:
                    scale, offset = s0, o0
                zeros = column
                if ZEROS:
                    zeros = offset.to(tl.int32)
                integers = packed
                if HALVES == 2:
                    integers = (packed >> (4 * half)) & 15
                weights = _decode(integers, zeros, table, KIND, MIDDLE, ZEROS).to(values.dtype)
            left, right = values, weights
            if UPCAST:  # the interpreter's dot takes the bits of bfloat16 for integers
                left, right = values.to(tl.float32), weights.to(tl.float32)
            if KIND == FLOATS:
                acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
            else:
                product = tl.dot(left, tl.trans(right), input_precision=PRECISION)
                acc += product * _scale(scale)[None, :]
                if MINIMUMS:
                    sums = tl.sum(values.to(tl.float32), 1)
                    acc += sums[:, None] * offset[None, :]
        if AHEAD:
            s0, o0, s1, o1 = n0, q0, n1, q1
    if BIAS:  # noqa: SIM102
        if split == 0:
            acc += tl.load(bias + expert * N + column, exists, 0.0).to(tl.float32)[None, :]
    result = (split.to(tl.int64) * rows + target)[:, None] * N + column[None, :]
    tl.store(out + result, acc.to(out.dtype.element_ty), live[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_up(partials, out, size, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Add up the parts of each result in order."""
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = element < size
    total = tl.load(partials + element, inside, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * size.to(tl.int64) + element, inside, 0.0)
    tl.store(out + element, total.to(out.dtype.element_ty), inside)


@triton.jit
def _combine_experts(
    outputs, shares, shared, out,
    N: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < N
    own = shares + row * (CHOSEN + SHARED)
    total = tl.zeros([SIZE], tl.float32)
    for rank in tl.static_range(CHOSEN):
        values = tl.load(outputs + (row * CHOSEN + rank) * N + column, inside, 0.0)
        total += values.to(tl.float32) * tl.load(own + rank)
    if SHARED:
        values = tl.load(shared + row * N + column, inside, 0.0)
        total += values.to(tl.float32) * tl.load(own + CHOSEN)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), inside)


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As plain.matrix.multiply."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    rows, n = len(x), weight.outputs
    launch = choose_launch(rows, x.dtype)
    blocks = triton.cdiv(rows, launch.rows) * triton.cdiv(n, launch.columns)
    splits = choose_splits(blocks, weight.inputs, weight.part) if rows <= 64 else 1
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if splits == 1:
        _launch(x, weight, bias, out, None, 1, launch, triton.cdiv(rows, launch.rows), 1)
        return out
    partials = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, partials, None, 1, launch, triton.cdiv(rows, launch.rows), splits)
    _add_up[(triton.cdiv(rows * n, ELEMENTS),)](partials, out, rows * n, SPLITS=splits, SIZE=ELEMENTS)
    return out


def multiply_routed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, routing: Routing, shared: int
) -> Tensor:
    """As plain.matrix.multiply_routed."""
    pairs = len(routing.order)
    out = torch.empty(pairs, weight.outputs, dtype=x.dtype, device=x.device)
    tile = tile_of(pairs, len(weight.numbers))
    launch = replace(choose_launch(tile, x.dtype), rows=tile)
    _launch(x, weight, bias, out, routing, shared, launch, len(routing.experts), 1)
    return out


def combine_experts(outputs: Tensor, shares: Tensor, shared: Tensor | None) -> Tensor:
    """As plain.matrix.combine_experts."""
    rows, n = len(shares), outputs.shape[1]
    out = torch.empty(rows, n, dtype=outputs.dtype, device=outputs.device)
    _combine_experts[(rows, triton.cdiv(n, ELEMENTS))](
        outputs, shares, outputs if shared is None else shared, out,
        N=n, CHOSEN=len(outputs) // rows, SHARED=shared is not None, SIZE=ELEMENTS,
    )  # fmt: skip
    return out


def _launch(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    routing: Routing | None,
    shared: int,
    launch: Launch,
    tiles: int,
    splits: int,
) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    order, experts, firsts, counts = routing or (x,) * 4
    offsets, zeros = weight.offsets, weight.offsets is not None and weight.offsets.dtype == torch.uint8
    _multiply[(tiles, triton.cdiv(weight.outputs, launch.columns), splits)](
        x, weight.numbers, x if weight.scales is None else weight.scales, x if offsets is None else offsets,
        x if bias is None else bias, _table(x.device) if weight.kind == Kind.IQ4 else x, out, order, experts,
        firsts, counts, out.shape[-2], x.stride(0),
        N=weight.outputs, K=weight.inputs, BYTES=weight.numbers.shape[-1], GROUP=max(weight.group, 1),
        GROUPS=1 if weight.scales is None else weight.scales.shape[-2], PART=weight.part,
        HALVES=2 if weight.bits == 4 else 1, KIND=int(weight.kind), MIDDLE=weight.middle, ZEROS=zeros,
        MINIMUMS=offsets is not None and not zeros, BIAS=bias is not None, ROUTED=routing is not None,
        SHARED=shared, SPLITS=splits, ROWS=launch.rows, COLUMNS=launch.columns,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        UPCAST=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        AHEAD=reads_ahead(launch, weight.kind, offsets is not None and not zeros, _capability()),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def choose_launch(rows: int, dtype: torch.dtype) -> Launch:
    """Return the launch for products of so many rows."""
    if dtype == torch.float32:
        return Launch(16, 32, 4, 2) if rows <= 16 else Launch(32, 64, 4, 2)
    if rows <= 16:
        return Launch(16, 64, 4, 4)
    return Launch(64, 64, 8, 3) if rows <= 64 else Launch(128, 64, 8, 3)


def reads_ahead(launch: Launch, kind: Kind, minimums: bool, capability: int) -> bool:
    """Return whether scales and offsets are read a chunk ahead, which takes registers: not on older devices,
    nor by large tiles with minimums."""
    return capability >= 90 and kind != Kind.FLOATS and not (minimums and launch.rows > 64)


def choose_splits(blocks: int, inputs: int, part: int) -> int:
    """Return into how many parts the inputs of a product of so many blocks are divided: none shorter than
    four steps."""
    wanted = 4 * _multiprocessors() // max(blocks, 1)
    return max(1, min(MAX_SPLITS, wanted, inputs // (8 * part)))


@lru_cache
def _multiprocessors() -> int:
    """Return the multiprocessors of the GPU; those of an H100 for the interpreter."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@lru_cache
def _capability() -> int:
    """Return the compute capability of the GPU; that of an H100 for the interpreter."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return 10 * major + minor


@lru_cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLES["iq4"], dtype=torch.float32, device=device)


def examples(capability: int) -> list[KernelExample]:
    """Return the launches of a matrix of 4096 x 4096 on a device of this compute capability."""
    b, i = "*bf16", "*i32"
    pointers = {"x": b, "numbers": "*u8", "scales": b, "offsets": "*u8", "bias": b, "table": "*fp32"}
    pointers |= {"out": b, "rows": "i32", "x_stride": "i32"}
    pointers |= dict.fromkeys(("order", "experts", "firsts", "counts"), i)
    fixed = {
        "N": 4096, "K": 4096, "GROUP": 128, "GROUPS": 32, "PART": 64, "MIDDLE": 8, "ZEROS": False,
        "MINIMUMS": False, "BIAS": False, "ROUTED": False, "SHARED": 1, "SPLITS": 1, "PRECISION": "tf32",
        "UPCAST": False,
    }  # fmt: skip
    four = {"KIND": int(Kind.INTEGERS), "BYTES": 2048, "HALVES": 2}
    eight = {"KIND": int(Kind.INTEGERS), "BYTES": 4096, "HALVES": 1, "MIDDLE": 128}
    routed = {"ROUTED": True, "SHARED": 4, "BIAS": True}
    kinds = {
        "4 bits": four | {"ZEROS": True},
        "4 bits, minimums": four | {"MINIMUMS": True, "PART": 32, "GROUP": 32, "GROUPS": 128},
        "8 bits": eight,
        "fp8": eight | {"KIND": int(Kind.E4M3)},
        "iq4": four | {"KIND": int(Kind.IQ4), "PART": 32, "GROUP": 32, "GROUPS": 128},
    }
    experts = {
        "experts in mxfp4": four | routed
        | {"KIND": int(Kind.MXFP4), "PART": 32, "GROUP": 32, "GROUPS": 128},
        "experts in bf16": routed | {"KIND": int(Kind.FLOATS), "BYTES": 4096, "HALVES": 1},
    }  # fmt: skip
    launches, every = [], kinds | experts
    chosen = {1: every, 64: ("4 bits", *experts), 512: ("4 bits", "4 bits, minimums", "iq4")}
    for rows, names in chosen.items():
        launch = choose_launch(rows, torch.bfloat16)
        for kind in names:
            options = every[kind]
            constants = fixed | {"ROWS": launch.rows, "COLUMNS": launch.columns} | options
            kind_of, minimums = Kind(constants["KIND"]), bool(constants["MINIMUMS"])
            constants["AHEAD"] = reads_ahead(launch, kind_of, minimums, capability)
            signature = pointers | dict.fromkeys(constants, "constexpr")
            signature |= {"offsets": "*fp32"} if constants["MINIMUMS"] else {}
            signature |= {"scales": "*u8"} if constants["KIND"] == Kind.MXFP4 else {}
            signature |= {"numbers": b} if constants["KIND"] == Kind.FLOATS else {}
            name = f"multiply {launch.rows} rows, {kind}"
            launches.append(KernelExample(name, _multiply, signature, constants, launch.warps, launch.stages))
    add = {"partials": "*fp32", "out": b, "size": "i32"}
    combine = {"outputs": b, "shares": "*fp32", "shared": b, "out": b}
    return [
        *launches,
        KernelExample("multiply: add up", _add_up, add, {"SPLITS": 4, "SIZE": ELEMENTS}),
        KernelExample(
            "combine experts", _combine_experts, combine,
            {"N": 4096, "CHOSEN": 4, "SHARED": True, "SIZE": ELEMENTS},
        ),
    ]  # fmt: skip
