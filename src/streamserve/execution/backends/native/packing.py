"""Pack weights into the layout of the kernels: numbers, scales, offsets, and the order of inputs."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.backends.native.library import (
    BLOCKS,
    SOURCES,
    TYPES,
    Numbers,
    PackResult,
    Path,
    ScaleType,
    ThreadPool,
)
from streamserve.execution.backends.native.structures import CHUNK, PANEL, LinearStruct
from streamserve.execution.formats.quantization import (
    LEVEL_INPUTS,
    TABLES,
    TILE,
    BlockWeight,
    NotFinite,
    QuantizedWeight,
    StoredWeight,
    StripedWeight,
    WeightFormat,
)

E4M3_PART = 256.0
"""The kernels read an e4m3 number as 1/256 of its value, so their scales are 256 times as large."""

STRIP = 1 << 18
"""Numbers that are unpacked at a time, so that they stay in the processor's cache until they are packed."""

Addresses = NDArray[np.uint64]

SHORT = {ScaleType.BFLOAT16: torch.bfloat16, ScaleType.FLOAT16: torch.float16}


TABLE_TYPES = SHORT | {ScaleType.FLOAT32: torch.float32, ScaleType.E8M0: torch.uint8}
"""The torch dtypes of stored scales."""


@dataclass(frozen=True)
class Packed:
    """A weight in the layout of the kernels; padding is zero.

    * `numbers`: floats or integers.
    * `scales` and `offsets` [out / 64, groups, 64], if it is quantized. By the struct's `scale_type` both are
      float32; or scales have 16 bits and offsets are zero points (int8); or scales have 8 bits and there are
      no offsets. With two levels both are [out / 64, in / 256, bytes]: 64 float16, and the numbers of 8 bits
      [groups of 256 inputs, 64] that are multiplied with them.
    * `order` [padded inputs] (int32): the order of the inputs, if they are not in order.
    * `table` [16] (uint8): if given, the numbers are indices of it.
    """

    numbers: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None
    table: Tensor | None = None

    @property
    def tables(self) -> dict[str, Tensor]:
        """The tensors other than the numbers, by field of LinearStruct."""
        tables = {"scales": self.scales, "offsets": self.offsets, "order": self.order, "table": self.table}
        return {field: table for field, table in tables.items() if table is not None}


def pack(
    pool: ThreadPool,
    struct: LinearStruct,
    weight: QuantizedWeight | StripedWeight | StoredWeight | BlockWeight,
    outputs: Tensor,
) -> Packed:
    """Return a weight packed for `struct`, with its outputs in the order of `outputs` (whole panels; -1 is
    padding). Completes `struct`, which then points to the result. Raises NotFinite for a stored weight with
    numbers that are not finite."""
    if isinstance(weight, QuantizedWeight | StripedWeight):
        packed = _pack_quantized(pool, struct, weight, outputs)
    elif isinstance(weight, BlockWeight):
        packed = _pack_blocks(pool, struct, weight, outputs)
    elif weight.format is None:
        packed = _pack_floats(pool, struct, weight, outputs)
    else:
        packed = _round(pool, struct, weight, weight.format, outputs)
    struct.weight = packed.numbers.data_ptr()
    struct.scales, struct.offsets = _address(packed.scales), _address(packed.offsets)
    struct.order, struct.table = _address(packed.order), _address(packed.table)
    return packed


def unpack_floats(pool: ThreadPool, weight: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight of blocks as floats of `dtype`, float32 or bfloat16. Raises NotFinite if a number is
    not finite."""
    rows, kinds = _block_rows(weight, torch.arange(weight.shape[0]))
    floats = torch.empty(weight.shape, dtype=dtype)
    pool.large_pages(floats)
    if not pool.library.ss_unpack_floats(
        pool.handle, rows.ctypes.data, kinds.ctypes.data, *weight.shape, TYPES[dtype], floats.data_ptr()
    ):
        raise NotFinite
    return floats


def _pack_floats(pool: ThreadPool, struct: LinearStruct, weight: StoredWeight, outputs: Tensor) -> Packed:
    numbers = pool.memory(struct.n_padded * struct.k_padded * weight.dtype.itemsize)
    rows, source = _rows(weight.parts, outputs), SOURCES[weight.parts[0].dtype]
    if not pool.library.ss_pack(
        pool.handle, ctypes.byref(struct), rows.ctypes.data, source, numbers.data_ptr()
    ):
        raise NotFinite
    return Packed(numbers)


def _round(
    pool: ThreadPool, struct: LinearStruct, weight: StoredWeight, format: WeightFormat, outputs: Tensor
) -> Packed:
    """Return a weight rounded to a `format` of integers, with the same numbers as quantization.quantize."""
    _describe(struct, format, Numbers.INTEGERS, ScaleType.BFLOAT16)
    tables = struct.n_padded // PANEL, -(-struct.k_padded // struct.group), PANEL
    numbers = pool.memory(struct.n_padded * struct.k_padded * format.bits // 8)
    scales = _table_memory(pool, tables, torch.bfloat16)
    zeros = None if format.symmetric else _table_memory(pool, tables, torch.int8)
    rows, source = _rows(weight.parts, outputs), SOURCES[weight.parts[0].dtype]
    if not pool.library.ss_quantize(
        pool.handle,
        ctypes.byref(struct),
        rows.ctypes.data,
        source,
        format.symmetric,
        numbers.data_ptr(),
        scales.data_ptr(),
        _address(zeros),
    ):
        raise NotFinite
    return Packed(numbers, scales, zeros)


def _pack_blocks(pool: ThreadPool, struct: LinearStruct, weight: BlockWeight, outputs: Tensor) -> Packed:
    """Return blocks packed with their scales in the fewest bits that represent them exactly."""
    format, table = weight.format, _table(weight.format)
    rows, kinds = _block_rows(weight, outputs)
    struct.table = _address(table)
    for scale_type in _scale_types(format):
        _describe(struct, format, Numbers.INTEGERS, scale_type)
        shape, dtype = _tables_of_blocks(struct, scale_type)
        numbers = pool.memory(struct.n_padded * struct.k_padded * format.bits // 8)
        scales = _table_memory(pool, shape, dtype)
        minimums = None if format.symmetric else _table_memory(pool, shape, dtype)
        result = pool.library.ss_pack_blocks(
            pool.handle,
            ctypes.byref(struct),
            rows.ctypes.data,
            kinds.ctypes.data,
            numbers.data_ptr(),
            scales.data_ptr(),
            _address(minimums),
        )
        if result == PackResult.NOT_FINITE:
            raise NotFinite
        if result == PackResult.PACKED:
            break
    return Packed(numbers, scales, minimums, table=table)


def _scale_types(format: WeightFormat) -> list[ScaleType]:
    """Return the types to try for the scales of blocks, in order; the last one is always possible."""
    if format.levels:
        return [ScaleType.LEVELS, ScaleType.FLOAT32]
    if format.wide_tables:
        return [ScaleType.FLOAT32]
    return [ScaleType.E8M0 if format.table == "mxfp4" else ScaleType.FLOAT16, ScaleType.FLOAT32]


def _tables_of_blocks(
    struct: LinearStruct, scale_type: ScaleType
) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape and the dtype of the scales, and of the minimums if there are any."""
    panels = struct.n_padded // PANEL
    if scale_type == ScaleType.LEVELS:
        return (panels, struct.k // LEVEL_INPUTS, PANEL * (2 + LEVEL_INPUTS // struct.group)), torch.uint8
    return (panels, -(-struct.k_padded // struct.group), PANEL), TABLE_TYPES[scale_type]


def _block_rows(weight: BlockWeight, outputs: Tensor) -> tuple[Addresses, NDArray[np.int32]]:
    """Return, for each of `outputs`, the address of its blocks (0: padding) and their type."""
    addresses, kinds = [], []
    for part in weight.parts:
        first, stride = part.blocks.ctypes.data, part.blocks.strides[0]
        rows = np.arange(len(part.blocks)) if part.order is None else part.order
        addresses.append(np.uint64(first) + rows.astype(np.uint64) * np.uint64(stride))
        kinds.append(np.full(len(rows), BLOCKS[part.kind], np.int32))
    chosen = outputs.numpy()
    existing = chosen.clip(min=0)
    joined = np.concatenate(addresses)[existing]
    return np.where(chosen < 0, np.uint64(0), joined), np.concatenate(kinds)[existing]


def _pack_quantized(
    pool: ThreadPool, struct: LinearStruct, weight: QuantizedWeight | StripedWeight, outputs: Tensor
) -> Packed:
    tables = weight.without_numbers() if isinstance(weight, StripedWeight) else weight
    floating = weight.format.floating
    scale_type, scales, offsets = _tables(tables)
    _describe(struct, weight.format, Numbers.E4M3 if floating else Numbers.INTEGERS, scale_type)
    depth, group = struct.k_padded, struct.group
    chosen, empty = outputs.clamp(min=0).long(), outputs < 0

    def by_panel(values: Tensor) -> Tensor:
        kept = torch.where(empty[:, None], torch.zeros((), dtype=values.dtype), values[chosen])
        kept = torch.nn.functional.pad(kept, (0, -(-depth // group) - kept.shape[1]))
        return kept.view(len(outputs) // PANEL, PANEL, -1).permute(0, 2, 1).contiguous()

    row = depth * weight.format.bits // 8
    numbers = pool.memory(struct.n_padded * row)
    for first, strip, stored in _strips(weight, outputs, pool.threads):
        to = numbers[first * row : (first + len(strip)) * row]
        (_pack_floats_8 if floating else _pack_integers)(pool, struct, stored, strip, to)
    return Packed(
        numbers,
        by_panel(scales),
        None if offsets is None else by_panel(offsets),
        None if weight.order is None else _padded(weight.order, depth),
        _table(weight.format),
    )


def _strips(
    weight: QuantizedWeight | StripedWeight, outputs: Tensor, threads: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield strips of whole panels of `outputs`, as (position of the first output, `places`, numbers). Output
    i of the strip has row places[i] of the numbers; -1 is padding."""
    if isinstance(weight, QuantizedWeight):
        yield 0, outputs, weight.numbers.contiguous()
        return
    count = PANEL * max(threads, STRIP // (PANEL * weight.shape[1]))
    for first in range(0, len(outputs), count):
        strip = outputs[first : first + count].long()
        rows = strip[strip >= 0].sort().values
        begins = torch.cat([rows[:1], rows[1:][rows.diff() > 1]]).tolist()
        ends = torch.cat([rows[:-1][rows.diff() > 1], rows[-1:]]).tolist()
        parts = [weight.numbers(begin, end + 1) for begin, end in zip(begins, ends, strict=True)]
        places = torch.where(strip < 0, -1, torch.searchsorted(rows, strip))
        yield first, places, parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _pack_integers(
    pool: ThreadPool, struct: LinearStruct, stored: Tensor, places: Tensor, to: Tensor
) -> None:
    """Pack the rows `places` of `stored`, which are integers, as panels to `to`."""
    strip = LinearStruct.from_buffer_copy(struct)
    strip.n_padded = len(places)
    rows = _rows([stored], places)
    pool.library.ss_pack_integers(pool.handle, ctypes.byref(strip), rows.ctypes.data, to.data_ptr())


def _pack_floats_8(
    pool: ThreadPool, struct: LinearStruct, stored: Tensor, places: Tensor, to: Tensor
) -> None:
    """Pack the rows `places` of `stored`, which are 8-bit floats, as panels to `to`."""
    padded = torch.nn.functional.pad(
        stored[places.clamp(min=0).long()], (0, struct.k_padded - stored.shape[1])
    )
    padded[places < 0] = 0
    to.copy_(_floats(padded, Path(struct.path)))


def _describe(struct: LinearStruct, format: WeightFormat, kind: Numbers, scale_type: ScaleType) -> None:
    """Set the fields of `struct` that describe a weight of `format`."""
    unit = CHUNK if format.floating else TILE
    struct.k_padded = -(-struct.k // unit) * unit
    struct.numbers, struct.bits, struct.group = kind, format.bits, format.group or struct.k_padded
    struct.scale_type = scale_type


def _rows(parts: Sequence[Tensor], outputs: Tensor) -> Addresses:
    """Return the address of each of `outputs` in the joined `parts`, which must have contiguous rows and one
    dtype; 0: padding."""
    addresses = np.concatenate([
        part.data_ptr() + np.arange(len(part), dtype=np.uint64) * np.uint64(part.stride(0) * part.itemsize)
        for part in parts
    ])  # fmt: skip
    chosen = outputs.numpy()
    rows: Addresses = np.where(chosen < 0, np.uint64(0), addresses[chosen.clip(min=0)])
    return rows


def _table_memory(pool: ThreadPool, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    return pool.memory(prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _address(table: Tensor | None) -> int | None:
    return None if table is None else table.data_ptr()


def _tables(weight: QuantizedWeight) -> tuple[ScaleType, Tensor, Tensor | None]:
    """Return the type of the scales, and scales and offsets [out, groups], in the fewest bits that represent
    them exactly."""
    if weight.format.floating:
        return ScaleType.FLOAT32, weight.scales * E4M3_PART, None
    if weight.format.table == "mxfp4":
        exponents = (weight.scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        if torch.equal((exponents.to(torch.int32) << 23).view(torch.float32), weight.scales):
            return ScaleType.E8M0, exponents, None
    if not weight.format.wide_tables:
        zeros = None if weight.zeros is None else weight.zeros.to(torch.int8)
        for scale_type, dtype in SHORT.items():
            short = weight.scales.to(dtype)
            if torch.equal(short.float(), weight.scales):
                return scale_type, short, zeros
    return ScaleType.FLOAT32, weight.scales, weight.offsets


def _table(format: WeightFormat) -> Tensor | None:
    """Return the table of a format's indices as unsigned 8-bit numbers; None if it has no table."""
    if format.table is None:
        return None
    return torch.tensor([value + 128 for value in TABLES[format.table]], dtype=torch.uint8)


def _floats(numbers: Tensor, path: Path) -> Tensor:
    """Return the bytes of 8-bit floats [out, depth] in the layout of native/cpp/gemm.h: two vectors wide."""
    columns = 32 if path >= Path.AVX512 else 16
    return numbers.view(-1, columns, numbers.shape[1]).permute(0, 2, 1).reshape(-1)


def _padded(order: Tensor, depth: int) -> Tensor:
    return torch.cat([order, torch.arange(len(order), depth)]).to(torch.int32)
