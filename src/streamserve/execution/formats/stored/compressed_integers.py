"""The integer formats of compressed-tensors: the tensors of a weight [out, in].

    pack-quantized   weight_packed      int32 [out, in · bits / 32]      32-bit words of unsigned numbers,
                                                                        the first in the lowest bits
                     weight_shape       int64 [2]                       out, in
                     weight_zero_point  int32 [out · bits / 32, groups]  packed like the numbers, along out
    int-quantized    weight             int8 [out, in]                   numbers minus 128 (of 8 bits), or
                                                                        minus 8 (of 4 bits)
                     weight_zero_point  int8 [out, groups]               as in weight
    both             weight_scale       float [out, groups]
                     weight_g_idx       int32 [in]                       the group of each input

Symmetric weights have no zero points; with one group a row, groups is 1. Sizes are rounded up to whole words.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor
from streamserve.execution.formats.quantization import QuantizedWeight, StripedWeight, WeightFormat
from streamserve.execution.formats.stored.formats import Shape
from streamserve.execution.formats.stored.order import index_header, input_order
from streamserve.execution.formats.stored.words import pack, unpack, words

Numbers = Callable[[int, int], Tensor]
"""Returns the numbers of the outputs first to last - 1 (quantization.py: StripedWeight)."""


@dataclass(frozen=True)
class CompressedIntegers:
    """The format of `weights` whose numbers are `packed` into 32-bit words, or one a byte. `ordered`: whether
    the inputs of a group need not be adjacent, so that weight_g_idx is required."""

    weights: WeightFormat
    packed: bool
    ordered: bool = False

    def headers(self, module: str, shape: Shape) -> dict[str, ExpectedTensor]:
        """Return the required tensors of the weight of `module`, with shape [out, in], by name."""
        rows, columns = shape
        bits, groups = self.weights.bits, self.weights.groups(columns)
        tensors = {
            f"{module}.weight_scale": ExpectedTensor((rows, groups)),
            f"{module}.weight_g_idx": index_header(columns, optional=not self.ordered),
        }
        if self.packed:
            tensors[f"{module}.weight_packed"] = ExpectedTensor((rows, words(columns, bits)), ("I32",))
            tensors[f"{module}.weight_shape"] = ExpectedTensor((2,), ("I64",))
            zeros = ExpectedTensor((words(rows, bits), groups), ("I32",))
        else:
            tensors[f"{module}.weight"] = ExpectedTensor(shape, ("I8",))
            zeros = ExpectedTensor((rows, groups), ("I8",))
        if not self.weights.symmetric:
            tensors[f"{module}.weight_zero_point"] = zeros
        return tensors

    def read(self, checkpoint: Checkpoint, module: str, shape: Shape) -> StripedWeight:
        """Return the weight of `module`, whose tensors were checked. Raises CheckpointError for numbers that
        the format does not have."""
        order = input_order(checkpoint, f"{module}.weight_g_idx", shape[1], self.weights.group)
        scales = checkpoint.tensor([f"{module}.weight_scale"], torch.float32)
        read, zeros = (self._packed if self.packed else self._plain)(checkpoint, module, shape)

        def numbers(first: int, last: int) -> Tensor:
            return read(first, last) if order is None else read(first, last)[:, order]

        return StripedWeight(self.weights, shape, numbers, scales, zeros, order)

    def _packed(self, checkpoint: Checkpoint, module: str, shape: Shape) -> tuple[Numbers, Tensor | None]:
        (rows, columns), bits = shape, self.weights.bits
        written = checkpoint.integers(f"{module}.weight_shape").tolist()
        if written != [rows, columns]:
            checkpoint.refuse(f"{module}.weight_shape", f"says {written}, not {[rows, columns]}")
        zeros = None
        if not self.weights.symmetric:
            stored = checkpoint.integers(f"{module}.weight_zero_point").T
            zeros = unpack(stored, bits, rows).T.contiguous()
        packed = checkpoint.view(f"{module}.weight_packed")
        return lambda first, last: unpack(packed[first:last], bits, columns), zeros

    def _plain(self, checkpoint: Checkpoint, module: str, shape: Shape) -> tuple[Numbers, Tensor | None]:
        def unsigned(name: str, numbers: Tensor) -> Tensor:
            """Return int8 `numbers` of the tensor `name` as unsigned numbers."""
            if self.weights.bits == 4 and not bool(((numbers >= -8) & (numbers < 8)).all()):
                checkpoint.refuse(name, "holds numbers of more than 4 bits")
            return numbers.view(torch.uint8) + self.weights.middle  # modulo 256

        zeros = None
        if not self.weights.symmetric:
            name = f"{module}.weight_zero_point"
            zeros = unsigned(name, checkpoint.integers(name))
        stored = checkpoint.view(f"{module}.weight")
        return lambda first, last: unsigned(f"{module}.weight", stored[first:last]), zeros


def written_as(weights: WeightFormat) -> CompressedIntegers:
    """Return the format in which weights are written: in bytes with one scale an output, the form that vLLM
    reads, otherwise packed."""
    return CompressedIntegers(weights, packed=weights.group is not None)


def written_tensors(
    stored: CompressedIntegers, module: str, weight: QuantizedWeight, scale_dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a weight of integers whose groups follow the inputs. `scale_dtype` must
    represent its scales exactly."""
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
