"""Quantized weights as the kernels read them: numbers, and scales, offsets and the order of inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.native.library import CHUNK, PANEL, Numbers, Path, ScaleType
from streamserve.execution.quantization import TABLES, TILE, QuantizedWeight

E4M3_PART = 256.0
"""The kernels read a number of e4m3 as its 256th part, and have scales that many times larger."""


SHORT = {ScaleType.BFLOAT16: torch.bfloat16, ScaleType.FLOAT16: torch.float16}


@dataclass(frozen=True)
class Packed:
    """A weight whose inputs are padded to `depth`: the bytes of its `numbers`, `scales` and perhaps `offsets`
    [out / 64, groups, 64] for each `group` of inputs, and perhaps the inputs' `order` [depth] (int32). What
    is padded is zero. By `scale_type` scales and offsets are float32, or scales have 16 bits, and the offsets
    are zero points (int8), or scales have 8 bits and there are no offsets. With a `table` [16] (uint8) the
    numbers are its indices."""

    kind: Numbers
    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None
    group: int
    depth: int
    scale_type: ScaleType
    table: Tensor | None

    @property
    def tables(self) -> dict[str, Tensor]:
        """What the kernels read besides the numbers, by field of LinearStruct."""
        tables = {"scales": self.scales, "offsets": self.offsets, "order": self.order, "table": self.table}
        return {field: table for field, table in tables.items() if table is not None}


def pack(weight: QuantizedWeight, outputs: Tensor, path: Path) -> Packed:
    """Return a weight as the kernels of `path` read it, in the order of `outputs` (whole panels, -1 is
    padding)."""
    floating = weight.format.floating
    inputs = weight.numbers.shape[1]
    depth = -(-inputs // (CHUNK if floating else TILE)) * (CHUNK if floating else TILE)
    group = weight.format.group or depth
    chosen, empty = outputs.clamp(min=0).long(), outputs < 0
    numbers = torch.nn.functional.pad(weight.numbers[chosen], (0, depth - inputs))

    def by_panel(values: Tensor) -> Tensor:
        kept = torch.where(empty[:, None], torch.zeros((), dtype=values.dtype), values[chosen])
        kept = torch.nn.functional.pad(kept, (0, -(-depth // group) - kept.shape[1]))
        return kept.view(len(outputs) // PANEL, PANEL, -1).permute(0, 2, 1).contiguous()

    scale_type, scales, offsets = _tables(weight)
    return Packed(
        Numbers.E4M3 if floating else Numbers.INTEGERS,
        _floats(numbers, path) if floating else _integers(numbers, weight.format.bits),
        by_panel(scales),
        None if offsets is None else by_panel(offsets),
        None if weight.order is None else _padded(weight.order, depth),
        group,
        depth,
        scale_type,
        _table(weight),
    )


def _tables(weight: QuantizedWeight) -> tuple[ScaleType, Tensor, Tensor | None]:
    """Return scales and offsets [out, groups], in fewer bits where these hold them exactly."""
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


def _table(weight: QuantizedWeight) -> Tensor | None:
    """Return the table of a weight's indices as numbers of 8 bits."""
    if weight.format.table is None:
        return None
    return torch.tensor([value + 128 for value in TABLES[weight.format.table]], dtype=torch.uint8)


def _integers(numbers: Tensor, bits: int) -> Tensor:
    """Return the bytes of integers [out, depth], as native/cpp/gemm_int.cpp draws them."""
    panels = len(numbers) // PANEL, PANEL
    if bits == 8:
        return numbers.view(*panels, -1, 4).permute(0, 2, 1, 3).reshape(-1)
    halves = numbers.view(*panels, -1, 2, TILE // 8, 4).permute(3, 0, 2, 4, 1, 5)
    return (halves[0] | halves[1] << 4).reshape(-1)


def _floats(numbers: Tensor, path: Path) -> Tensor:
    """Return the bytes of floats [out, depth], as native/cpp/gemm.h draws them: two vectors wide."""
    columns = 32 if path >= Path.AVX512 else 16
    return numbers.view(-1, columns, numbers.shape[1]).permute(0, 2, 1).reshape(-1)


def _padded(order: Tensor, depth: int) -> Tensor:
    return torch.cat([order, torch.arange(len(order), depth)]).to(torch.int32)
