"""Products with packed weights on the tensor cores, of all rows or of the experts that each row chose.

    for each chunk of the inputs:    words of 2 or 4 parts of the inputs (packing.py)
      for each part of it:           numbers (exact in bfloat16) · xᵀ on the tensor cores, in float32
        acc += scale · product       and offset · sum of x

The weights are the left operand, which the tensor cores read from registers: words are decoded where they
are multiplied. Scales are applied to the products, in float32, so weights are not rounded to bfloat16.
"""
# mypy: ignore-errors

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.backends.cuda.kernels.decoding import FLOATS, decode_part, iq4_table, widen
from streamserve.execution.backends.cuda.kernels.expand import multiply_expanded, scratch_of
from streamserve.execution.backends.cuda.packing import MIN_PART, Kind, PackedWeight
from streamserve.execution.backends.cuda.routing import Routing, tile_of

MAX_SPLITS = 8
"""Maximum ranges that the inputs of a product of few rows are divided into, to occupy the device."""

PROGRAMS = 4
"""Maximum programs per multiprocessor that a product of few rows is divided into."""

MAX_BLOCKS = 4096
"""Maximum tiles of a product with divided inputs."""

MANY_ROWS = 256
"""Minimum rows of products for which weights are expanded to floats for the device's library."""

ELEMENTS = 1024


@dataclass(frozen=True)
class MatrixLaunch:
    """Rows, columns and warps of a program, and the number of steps whose loads are in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.constexpr_function
def _word(bits: int, count: int) -> tl.dtype:
    """Return the type of the integers, of at most 64 bits, that `count` numbers of a table are loaded as."""
    return {8: tl.int8, 16: tl.int16, 32: tl.int32}.get(bits * count, tl.int64)


@triton.jit
def _load_tables(table, group, exists, COUNT: tl.constexpr):
    """Return the scales or offsets of COUNT groups from `group`, which lie next to each other, in one or two
    integers."""
    BITS: tl.constexpr = table.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = _word(BITS, COUNT)
    place = (table + group).to(tl.pointer_type(WORD), bitcast=True)
    first = tl.load(place, exists, 0)
    second = first
    if BITS * COUNT > 64:
        second = tl.load(place + 1, exists, 0)
    return first, second


@triton.jit
def _entry(first, second, NUMBER: tl.constexpr, TYPE: tl.constexpr):
    """Return number NUMBER of the table entries of type TYPE in `first` and `second` (see `_load_tables`)."""
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    EACH: tl.constexpr = first.dtype.primitive_bitwidth // BITS
    word = first if NUMBER < EACH else second
    INTEGER: tl.constexpr = tl.int32 if BITS == 32 else tl.int16 if BITS == 16 else tl.uint8
    number = (word >> (BITS * (NUMBER % EACH))).to(INTEGER)
    if BITS > 8:
        number = number.to(TYPE, bitcast=True)
    return number


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, numbers, scales, offsets, bias, table, out, order, experts, firsts, counts, partials, arrivals,
    rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, BIAS: tl.constexpr, ROUTED: tl.constexpr,
    SHARED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, PAIRS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Multiply a range of columns by a tile of rows, over the program's share of the inputs. With several
    SPLITS, the last program to arrive adds up the `partials` [splits, rows, N] of all programs, in order.
    PAIRS: words are decoded two at a time, to bfloat16."""
    tile, split = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (column < N) | (N % COLUMNS == 0)
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
    own = numbers + (expert * N + column)[:, None] * WORDS
    tables = (expert * N + column) * GROUPS
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    ones = tl.full([COLUMNS, PART], 1.0, tl.float32 if UPCAST else x.dtype.element_ty)
    CHUNK: tl.constexpr = PART * PARTS
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    SHARE: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    BITS: tl.constexpr = 16 // PARTS
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    OFFSETS: tl.constexpr = ZEROS or MINIMUMS
    RUNS: tl.constexpr = PARTS // RUN
    SCALE: tl.constexpr = scales.dtype.element_ty
    OFFSET: tl.constexpr = offsets.dtype.element_ty
    scale, offset = (acc, acc), (acc, acc)
    if KIND != FLOATS:  # Triton does not pipeline such narrow loads: issue them a chunk ahead
        group = tables + tl.minimum(split * SHARE * CHUNK // GROUP, GROUPS - RUNS)
        scale = _load_tables(scales, group, exists, RUNS)
        if OFFSETS:
            offset = _load_tables(offsets, group, exists, RUNS)
    for chunk in range(split * SHARE, tl.minimum(split * SHARE + SHARE, CHUNKS)):
        next_scale, next_offset = scale, offset
        if KIND != FLOATS:
            group = tables + tl.minimum((chunk + 1) * CHUNK // GROUP, GROUPS - RUNS)
            next_scale = _load_tables(scales, group, exists, RUNS)
            if OFFSETS:
                next_offset = _load_tables(offsets, group, exists, RUNS)
            words = tl.load(own + (chunk * PART + part)[None, :], exists[:, None], 0)
        product = tl.zeros([COLUMNS, ROWS], tl.float32)
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for half in tl.static_range(PARTS):
            key = (chunk * PARTS + half) * PART + part
            inside = (key < K) | (K % CHUNK == 0)
            right = tl.load(vectors + key[None, :], live[:, None] & inside[None, :], 0.0)
            if KIND == FLOATS:
                left = tl.load(own + key[None, :], exists[:, None] & inside[None, :], 0.0)
            else:
                zero = tl.full([1, 1], 0 if MINIMUMS else MIDDLE, tl.int32)
                left = decode_part(words, table, zero, KIND, BITS, half, PAIRS).to(right.dtype)
            if UPCAST:  # the interpreter's dot treats bfloat16 bits as integers
                left, right = left.to(tl.float32), right.to(tl.float32)
            if KIND == FLOATS:
                acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
            else:
                product = tl.dot(left, tl.trans(right), product, input_precision=PRECISION)
                if OFFSETS:
                    sums = tl.dot(ones, tl.trans(right), sums, input_precision=PRECISION)
                if half % RUN == RUN - 1:
                    own_scale = widen(_entry(scale[0], scale[1], half // RUN, SCALE))
                    acc += product * own_scale[:, None]
                    product = tl.zeros([COLUMNS, ROWS], tl.float32)
                    if OFFSETS:
                        added = _entry(offset[0], offset[1], half // RUN, OFFSET).to(tl.float32)
                        if ZEROS:
                            added = own_scale * (MIDDLE - added)
                        acc += sums * added[:, None]
                        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        scale, offset = next_scale, next_offset
    if BIAS:  # noqa: SIM102
        if split == 0:
            acc += tl.load(bias + expert * N + column, exists, 0.0).to(tl.float32)[:, None]
    result = target.to(tl.int64)[None, :] * N + column[:, None]
    stored = live[None, :] & exists[:, None]
    if SPLITS > 1:
        size = rows.to(tl.int64) * N
        tl.store(partials + split * size + result, acc, stored)
        tl.debug_barrier()  # the arrival makes the stores of all threads visible
        arrival = arrivals + tile * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrival, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrival, 0)
        acc = tl.load(partials + result, stored, 0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(partials + other * size + result, stored, 0.0, cache_modifier=".cg")
    tl.store(out + result, acc.to(out.dtype.element_ty), stored)


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


def prepare(device: torch.device) -> None:
    """Allocate the memory that products of all shapes share. It must not be allocated while a graph is
    captured: it would belong to the graph."""
    scratch_of(device)
    iq4_table(device)
    _arrivals(device)


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `plain.matrix.multiply`."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    rows, n = len(x), weight.outputs
    if rows >= MANY_ROWS:
        return multiply_expanded(x, weight, bias, dtype)
    launch = choose_launch(rows, weight.part, x.dtype, _capability())
    tiles = triton.cdiv(rows, launch.rows)
    splits = choose_splits(tiles * triton.cdiv(n, launch.columns), weight) if rows <= 64 else 1
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    _launch(x, weight, bias, out, None, 1, launch, tiles, splits)
    return out


def multiply_routed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, routing: Routing, shared: int
) -> Tensor:
    """See `plain.matrix.multiply_routed`."""
    pairs = len(routing.order)
    out = torch.empty(pairs, weight.outputs, dtype=x.dtype, device=x.device)
    tile = tile_of(pairs, len(weight.numbers))
    launch = replace(choose_launch(tile, weight.part, x.dtype, _capability()), rows=tile)
    _launch(x, weight, bias, out, routing, shared, launch, len(routing.experts), 1)
    return out


def combine_experts(outputs: Tensor, shares: Tensor, shared: Tensor | None) -> Tensor:
    """See `plain.matrix.combine_experts`."""
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
    launch: MatrixLaunch,
    tiles: int,
    splits: int,
) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    order, experts, firsts, counts = routing or (x,) * 4
    offsets, zeros = weight.offsets, weight.offsets is not None and weight.offsets.dtype == torch.uint8
    minimums, floats = offsets is not None and not zeros, weight.kind == Kind.FLOATS
    partials, arrivals = x, x
    if splits > 1:
        partials = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    numbers = weight.numbers if floats else weight.numbers.view(torch.int16)
    _multiply[(tiles, triton.cdiv(weight.outputs, launch.columns), splits)](
        x, numbers, x if weight.scales is None else weight.scales, x if offsets is None else offsets,
        x if bias is None else bias, iq4_table(x.device), out, order, experts,
        firsts, counts, partials, arrivals, out.shape[-2], x.stride(0),
        N=weight.outputs, K=weight.inputs, WORDS=numbers.shape[-1], GROUP=max(weight.group, 1),
        GROUPS=1 if weight.scales is None else weight.scales.shape[-1], PART=weight.part, PARTS=weight.parts,
        RUN=weight.run, KIND=int(weight.kind), ZEROS=zeros, MINIMUMS=minimums,
        BIAS=bias is not None, ROUTED=routing is not None, SHARED=shared, SPLITS=splits, ROWS=launch.rows,
        COLUMNS=launch.columns,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PAIRS=decodes_pairs(weight.kind, x.dtype),
        UPCAST=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def decodes_pairs(kind: Kind, dtype: torch.dtype) -> bool:
    """Return whether words are decoded two at a time (decoding.decode_pairs)."""
    return (
        dtype == torch.bfloat16 and not triton.knobs.runtime.interpret and kind not in (Kind.FLOATS, Kind.IQ4)
    )


def choose_launch(rows: int, part: int, dtype: torch.dtype, capability: int) -> MatrixLaunch:
    """Return the launch for products of `rows` rows, in parts of `part` inputs. Tiles of 64 rows take 112 KiB
    of shared memory on capability 9.0, so two programs fit on a multiprocessor; on 10.0 they spill
    registers."""
    if dtype == torch.float32:
        return MatrixLaunch(16, 32, 4, 2) if rows <= 16 else MatrixLaunch(32, 64, 4, 2)
    if rows <= 8 and part == MIN_PART:  # each of more threads would load too little of x to be pipelined
        return MatrixLaunch(8, 32, 2, 5)
    if rows <= 16:
        return MatrixLaunch(8 if rows <= 8 else 16, 64, 4, 3)
    return MatrixLaunch(64 if rows > 32 and capability == 90 else 32, 64, 4, 3)


def choose_splits(blocks: int, weight: PackedWeight) -> int:
    """Return the number of ranges that the inputs of a product of `blocks` tiles are divided into. Each range
    has at least four steps."""
    wanted = PROGRAMS * _multiprocessors() // max(blocks, 1)
    return max(1, min(MAX_SPLITS, wanted, weight.inputs // (4 * weight.parts * weight.part)))


@lru_cache
def _multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU; without one, the number of an H100."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@lru_cache
def _capability() -> int:
    """Return the compute capability of the GPU (90 for 9.0); without one, the capability of an H100."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return 10 * major + minor


@lru_cache
def _arrivals(device: torch.device) -> Tensor:
    """Return counters of arrived programs, [MAX_BLOCKS]. They are zero between products."""
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
