"""A linear map packed for the kernels."""

import ctypes

import torch
from torch import Tensor

from streamserve.execution.linear import Format
from streamserve.execution.native.library import CHUNK, PANEL, TYPES, LinearStruct, ThreadPool
from streamserve.execution.quantization import TILE, IntegerWeight

STRIP = 16
"""Outputs whose integers lie together."""

_FORMATS: dict[torch.dtype, Format] = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NativeLinear:
    """`y = x Wᵀ + b` like execution.linear.Linear, with bits of a row that depend on that row only.

    `paired`: the weight is two halves, gates and values, packed in alternating groups of 32 for the SwiGLU
    that follows; such a map can be used only by the layers' kernel and cannot be called. `dtype` (float32 or
    bfloat16): of x and y where the weight is of integers; otherwise they have the weight's.
    """

    def __init__(
        self,
        pool: ThreadPool,
        weight: Tensor | IntegerWeight,
        bias: Tensor | None = None,
        paired: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        integers = weight if isinstance(weight, IntegerWeight) else None
        numbers = weight.numbers if isinstance(weight, IntegerWeight) else weight
        self.dtype = dtype if integers else numbers.dtype
        self.format = _format(integers, self.dtype)
        self.out_features, self.in_features = numbers.shape
        self._pool = pool
        self._paired = paired
        order = _pairs(self.out_features // 2) if paired else torch.arange(self.out_features)
        padded = _round_up(len(order), PANEL)
        order = torch.cat([order, torch.full((padded - len(order),), -1)]).to(torch.int32)
        depth = _round_up(self.in_features, TILE if integers else CHUNK)
        itemsize = integers.format.bits / 8 if integers else numbers.itemsize
        self._scales: Tensor | None = None
        self._offsets: Tensor | None = None
        self._memory = pool.memory(int(padded * depth * itemsize))
        self._bias = None
        if bias is not None:
            self._bias = torch.where(order < 0, 0.0, bias.float()[order.clamp(min=0).long()]).contiguous()
        self.struct = LinearStruct(
            weight=self._memory.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            n=padded if paired else self.out_features,
            k=self.in_features,
            n_padded=padded,
            k_padded=depth,
            path=pool.path(self.dtype),
            type=TYPES[self.dtype],
        )
        if integers:
            self._pack_integers(integers, order, depth)
            return
        plain = numbers.contiguous()
        pool.library.ss_pack(
            pool.handle, self.struct, plain.data_ptr(), order.data_ptr(), self._memory.data_ptr()
        )

    def _pack_integers(self, weight: IntegerWeight, order: Tensor, depth: int) -> None:
        """Pack integers, scales and offsets as native/cpp/gemm_int.cpp draws them; outputs in `order`, -1 is
        padding. Inputs are padded to `depth`, where x is zero."""
        format, group = weight.format, weight.format.group or depth
        chosen, empty = order.clamp(min=0).long(), order < 0
        numbers = torch.nn.functional.pad(weight.numbers[chosen], (0, depth - self.in_features))
        columns = len(order) // STRIP, STRIP
        if format.bits == 8:
            packed = numbers.view(*columns, -1, 4).permute(0, 2, 1, 3)
        else:
            halves = numbers.view(*columns, -1, 2, TILE // 8, 4).permute(3, 0, 2, 4, 1, 5)
            packed = halves[0] | halves[1] << 4
        self._memory.copy_(packed.reshape(-1))
        groups = -(-depth // group)

        def by_panel(values: Tensor) -> Tensor:
            kept = torch.where(empty[:, None], 0.0, values[chosen])
            kept = torch.nn.functional.pad(kept, (0, groups - kept.shape[1]))
            return kept.view(-1, PANEL, groups).permute(0, 2, 1).contiguous()

        offsets = weight.offsets
        self._scales = by_panel(weight.scales)
        self._offsets = None if offsets is None else by_panel(offsets)
        self.struct.scales = self._scales.data_ptr()
        self.struct.offsets = None if self._offsets is None else self._offsets.data_ptr()
        self.struct.bits, self.struct.group = format.bits, group

    @property
    def nbytes(self) -> int:
        """Memory of the packed weight, in bytes."""
        tables = (table for table in (self._scales, self._offsets) if table is not None)
        return self._memory.nbytes + sum(table.nbytes for table in tables)

    def __call__(self, x: Tensor, wide: bool = False, scale: float = 1.0, cap: float = 0.0) -> Tensor:
        """Map `x` [rows, in] of the weight's dtype to that dtype or, if `wide`, to unrounded float32: then
        multiplied by `scale`, and bounded by a `cap` other than 0 as cap · tanh(y / cap)."""
        if self._paired:
            raise ValueError("a map packed in pairs is for whole layers only")
        if x.dtype != self.dtype or x.shape[1] != self.in_features:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight takes {self.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        count = x.shape[0]
        out = torch.empty(count, self.out_features, dtype=torch.float32 if wide else self.dtype)
        if count:
            self._pool.library.ss_linear(
                self._pool.handle,
                ctypes.byref(self.struct),
                x.data_ptr(),
                x.stride(0),
                count,
                out.data_ptr(),
                wide,
                scale,
                cap,
            )
        return out

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows [len(numbers), in] of the weight as it was given, for int64 output indices
        `numbers`. Raises ValueError for others, and for a map packed in pairs or rounded to integers."""
        if self._paired or self.struct.bits:
            raise ValueError("rows are kept only of maps that are neither packed in pairs nor rounded")
        numbers = numbers.contiguous()
        count, values = numbers.shape[0], numbers.numpy()
        if count and not 0 <= int(values.min()) <= int(values.max()) < self.out_features:
            raise ValueError(f"the weight has rows 0 to {self.out_features - 1}")
        out = torch.empty(count, self.in_features, dtype=self.dtype)
        self._pool.library.ss_rows(
            self._pool.handle, ctypes.byref(self.struct), numbers.data_ptr(), count, out.data_ptr()
        )
        return out


def _format(weight: IntegerWeight | None, dtype: torch.dtype) -> Format:
    if weight is None:
        return _FORMATS[dtype]
    return "int8" if weight.format.bits == 8 else "int4"


def _pairs(half: int) -> Tensor:
    """Return the row order of gates and values in alternating groups of 32, short groups padded with -1."""
    turns = torch.arange(_round_up(half, CHUNK)).view(-1, 1, CHUNK)
    gates = torch.where(turns < half, turns, -1)
    values = torch.where(turns < half, turns + half, -1)
    return torch.cat([gates, values], dim=1).flatten()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
