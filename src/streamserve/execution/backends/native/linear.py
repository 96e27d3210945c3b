"""A linear map packed for the kernels."""

import ctypes
import functools
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from streamserve.execution.backends.native.library import TYPES, ThreadPool
from streamserve.execution.backends.native.packing import pack
from streamserve.execution.backends.native.structures import CHUNK, PANEL, LinearStruct
from streamserve.execution.backends.native.weight_arena import ArenaTensor
from streamserve.execution.formats.quantization import (
    BlockWeight,
    QuantizedWeight,
    StoredWeight,
    StripedWeight,
)
from streamserve.execution.model.linear import Format

NUMBERS = ("n", "k", "n_padded", "k_padded", "path", "type", "numbers", "bits", "group", "scale_type")
"""The fields of LinearStruct other than addresses."""

_FORMATS: dict[torch.dtype, Format] = {torch.float32: "f32", torch.bfloat16: "bf16"}


class StoredLinear(msgspec.Struct, frozen=True):
    """The index entry of a packed linear map in memory that processes share. `tensors` and `numbers` are by
    field of LinearStruct."""

    format: Format
    dtype: str
    out_features: int
    in_features: int
    paired: bool
    numbers: dict[str, int]
    tensors: dict[str, ArenaTensor]


class NativeLinear:
    """`y = x Wᵀ + b` like model.linear.Linear, computed by the kernels: a row's bits depend on that row
    only.

    * `paired`: the weight has two halves, gates and values. They are packed in alternating groups of 32 for
      the SwiGLU that follows. Such a map is for the layers' kernel only, and cannot be called.
    * `dtype` (float32 or bfloat16): the dtype of x and y if the weight is quantized; otherwise they have the
      weight's dtype.

    Raises NotFinite for a stored weight with numbers that are not finite.
    """

    format: Format
    """The storage format of the weight."""

    def __init__(
        self,
        pool: ThreadPool,
        weight: Tensor | QuantizedWeight | StripedWeight | StoredWeight | BlockWeight,
        bias: Tensor | None = None,
        paired: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if isinstance(weight, Tensor):
            weight = StoredWeight((weight.contiguous(),), weight.dtype)
        if weight.format is None:
            self.dtype, self.format, shape = weight.dtype, _FORMATS[weight.dtype], weight.shape
        else:
            self.dtype, self.format, shape = dtype, weight.format.kind, weight.shape
        self.out_features, self.in_features = shape
        self._pool = pool
        self._paired = paired
        order = self.column_order()
        padded = len(order)
        self._tensors: dict[str, Tensor] = {}
        self.struct = LinearStruct(
            n=padded if paired else self.out_features,
            k=self.in_features,
            n_padded=padded,
            k_padded=_round_up(self.in_features, CHUNK),
            path=pool.path(self.dtype),
            type=TYPES[self.dtype],
        )
        if bias is not None:
            padded_bias = torch.where(order < 0, 0.0, bias.float()[order.clamp(min=0).long()])
            self._keep({"bias": padded_bias.contiguous()})
        packed = pack(pool, self.struct, weight, order)
        self._keep({"weight": packed.numbers, **packed.tables})

    @classmethod
    def of_stored(
        cls, pool: ThreadPool, stored: StoredLinear, read: Callable[[ArenaTensor], Tensor]
    ) -> "NativeLinear":
        """Return the map that `stored` describes, with the tensors that `read` returns."""
        linear = cls.__new__(cls)
        linear.dtype, linear.format = getattr(torch, stored.dtype), stored.format
        linear.out_features, linear.in_features = stored.out_features, stored.in_features
        linear._pool, linear._paired, linear._tensors = pool, stored.paired, {}
        linear.struct = LinearStruct(**stored.numbers)
        linear._keep({field: read(tensor) for field, tensor in stored.tensors.items()})
        return linear

    def stored(self, write: Callable[[Tensor], ArenaTensor]) -> StoredLinear:
        """Store each tensor of this map with `write`. Return the index entry from which `of_stored` restores
        the map in another process."""
        return StoredLinear(
            self.format,
            str(self.dtype).removeprefix("torch."),
            self.out_features,
            self.in_features,
            self._paired,
            {name: getattr(self.struct, name) for name in NUMBERS},
            {field: write(tensor) for field, tensor in self._tensors.items()},
        )

    def _keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors by field of the struct, and set the struct's addresses."""
        for field, tensor in tensors.items():
            self._tensors[field] = tensor
            setattr(self.struct, field, tensor.data_ptr())

    def column_order(self) -> Tensor:
        """Return the output (int32) in each column of the packed weight; -1 is padding. The tensor is shared
        and must not be changed."""
        return _column_order(self.out_features, self._paired)

    @property
    def quantized(self) -> bool:
        """Whether the weight is quantized: it has scales."""
        return "scales" in self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return sum(tensor.nbytes for field, tensor in self._tensors.items() if field != "bias")

    def __call__(self, x: Tensor, wide: bool = False, scale: float = 1.0, cap: float = 0.0) -> Tensor:
        """Return y [rows, out] for `x` [rows, in], which must have the map's dtype. y has that dtype too, or
        if `wide` it is unrounded float32; then it is multiplied by `scale`, and bounded by a `cap` other than
        0 as cap · tanh(y / cap)."""
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
        """Return rows [len(numbers), in] of the original weight, for int64 output indices `numbers`. Raises
        ValueError for indices out of range, and for a map that is paired or quantized."""
        if self._paired or self.quantized:
            raise ValueError("rows are kept only of maps that are neither packed in pairs nor quantized")
        numbers = numbers.contiguous()
        count, values = numbers.shape[0], numbers.numpy()
        if count and not 0 <= int(values.min()) <= int(values.max()) < self.out_features:
            raise ValueError(f"the weight has rows 0 to {self.out_features - 1}")
        out = torch.empty(count, self.in_features, dtype=self.dtype)
        self._pool.library.ss_rows(
            self._pool.handle, ctypes.byref(self.struct), numbers.data_ptr(), count, out.data_ptr()
        )
        return out


@functools.lru_cache(maxsize=32)
def _column_order(outputs: int, paired: bool) -> Tensor:
    """Return NativeLinear.column_order. It is cached, because thousands of experts have the same order."""
    order = _pairs(outputs // 2) if paired else torch.arange(outputs)
    padding = _round_up(len(order), PANEL) - len(order)
    return torch.cat([order, torch.full((padding,), -1)]).to(torch.int32)


def _pairs(half: int) -> Tensor:
    """Return the row order that alternates groups of 32 gates and 32 values; short groups are padded with
    -1."""
    turns = torch.arange(_round_up(half, CHUNK)).view(-1, 1, CHUNK)
    gates = torch.where(turns < half, turns, -1)
    values = torch.where(turns < half, turns + half, -1)
    return torch.cat([gates, values], dim=1).flatten()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
