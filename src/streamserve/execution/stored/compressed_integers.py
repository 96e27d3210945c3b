"""The integer formats of compressed-tensors: the tensors that stand for a weight [out, in].

    pack-quantized   weight_packed      int32 [out, in · bits / 32]      32-bit words of unsigned numbers,
                                                                        the first in the lowest bits
                     weight_shape       int64 [2]                       out, in
                     weight_zero_point  int32 [out · bits / 32, groups]  packed like the numbers, along out
    int-quantized    weight             int8 [out, in]                   numbers less 128 or 8
                     weight_zero_point  int8 [out, groups]               likewise
    both             weight_scale       float [out, groups]
                     weight_g_idx       int32 [in]                       the group of each input

Symmetric weights have no zero points; with one group a row, groups is 1. Sizes are rounded up to whole words.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.checkpoint import Checkpoint, Header
from streamserve.execution.quantization import QuantizedWeight, WeightFormat
from streamserve.execution.stored.formats import Shape
from streamserve.execution.stored.order import index_header, input_order
from streamserve.execution.stored.words import pack, unpack, words


@dataclass(frozen=True)
class CompressedIntegers:
    """`weights` whose numbers are `packed` into 32-bit words, or one a byte. `ordered`: whether the inputs of
    a group need not follow each other, so that weight_g_idx must be there."""

    weights: WeightFormat
    packed: bool
    ordered: bool = False

    def headers(self, module: str, shape: Shape) -> dict[str, Header]:
        """Return the tensors, by name, that stand for the weight of `module` with this shape [out, in]."""
        rows, columns = shape
        bits, groups = self.weights.bits, self.weights.groups(columns)
        tensors = {
            f"{module}.weight_scale": Header((rows, groups)),
            f"{module}.weight_g_idx": index_header(columns, optional=not self.ordered),
        }
        if self.packed:
            tensors[f"{module}.weight_packed"] = Header((rows, words(columns, bits)), ("I32",))
            tensors[f"{module}.weight_shape"] = Header((2,), ("I64",))
            zeros = Header((words(rows, bits), groups), ("I32",))
        else:
            tensors[f"{module}.weight"] = Header(shape, ("I8",))
            zeros = Header((rows, groups), ("I8",))
        if not self.weights.symmetric:
            tensors[f"{module}.weight_zero_point"] = zeros
        return tensors

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> QuantizedWeight:
        """Return the weight of `module`, whose tensors were checked. Raises CheckpointError for numbers that
        the format does not have."""
        rows, columns = shape
        order = input_order(checkpoint, f"{module}.weight_g_idx", columns, self.weights.group)
        scales = checkpoint.tensor([f"{module}.weight_scale"], torch.float32)
        numbers, zeros = (self._packed if self.packed else self._plain)(checkpoint, module, rows, columns)
        numbers = numbers if order is None else numbers[:, order]
        return QuantizedWeight(self.weights, numbers, scales, zeros, order=order)

    def _packed(
        self, checkpoint: Checkpoint, module: str, rows: int, columns: int
    ) -> tuple[Tensor, Tensor | None]:
        bits = self.weights.bits
        written = checkpoint.integers(f"{module}.weight_shape").tolist()
        if written != [rows, columns]:
            checkpoint.refuse(f"{module}.weight_shape", f"says {written}, not {[rows, columns]}")
        numbers = unpack(checkpoint.integers(f"{module}.weight_packed"), bits, columns)
        if self.weights.symmetric:
            return numbers, None
        zeros = checkpoint.integers(f"{module}.weight_zero_point").T
        return numbers, unpack(zeros, bits, rows).T.contiguous()

    def _plain(
        self, checkpoint: Checkpoint, module: str, rows: int, columns: int
    ) -> tuple[Tensor, Tensor | None]:
        def unsigned(name: str) -> Tensor:
            """Return the numbers of a tensor of int8 as unsigned ones."""
            numbers = checkpoint.integers(name)
            if self.weights.bits == 4 and not bool(((numbers >= -8) & (numbers < 8)).all()):
                checkpoint.refuse(name, "holds numbers of more than 4 bits")
            return numbers.view(torch.uint8).add_(self.weights.middle)  # modulo 256

        zeros = None if self.weights.symmetric else unsigned(f"{module}.weight_zero_point")
        return unsigned(f"{module}.weight"), zeros


def written_as(weights: WeightFormat) -> CompressedIntegers:
    """Return how weights are written: with one scale an output in bytes, as vLLM reads them, else packed."""
    return CompressedIntegers(weights, packed=weights.group is not None)


def written_tensors(
    stored: CompressedIntegers, module: str, weight: QuantizedWeight, scale_dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a weight of integers whose groups are in order, its scales in a dtype that
    holds them exactly."""
    bits = weight.format.bits
    yield f"{module}.weight_scale", weight.scales.to(scale_dtype)
    if not stored.packed:
        assert weight.zeros is None
        yield f"{module}.weight", (weight.numbers.to(torch.int16) - weight.format.middle).to(torch.int8)
        return
    yield f"{module}.weight_packed", pack(weight.numbers, bits)
    yield f"{module}.weight_shape", torch.tensor(weight.numbers.shape, dtype=torch.int64)
    if weight.zeros is not None:
        yield f"{module}.weight_zero_point", pack(weight.zeros.T, bits).T.contiguous()
