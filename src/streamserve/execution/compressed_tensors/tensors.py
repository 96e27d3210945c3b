"""The tensors that stand for a module's weight [out, in] in a compressed-tensors checkpoint.

    pack-quantized   weight_packed      int32 [out, in · bits / 32]      32-bit words of unsigned numbers,
                                                                        the first in the lowest bits
                     weight_shape       int64 [2]                       out, in
                     weight_zero_point  int32 [out · bits / 32, groups]  packed like the numbers, along out
    int-quantized    weight             int8 [out, in]                   numbers less 128 or 8
                     weight_zero_point  int8 [out, groups]               likewise
    both             weight_scale       float [out, groups]

Symmetric weights have no zero points; with one group a row, groups is 1. Sizes are rounded up to whole words.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.compressed_tensors.config import StoredFormat
from streamserve.execution.quantization import QuantizedWeight
from streamserve.protocol.errors import CheckpointError

WORD = 32

Header = tuple[tuple[int, ...], str]
"""Shape and, for tensors of integers, the dtype as safetensors names it; empty for floats."""


def headers(module: str, shape: tuple[int, int], stored: StoredFormat) -> dict[str, Header]:
    """Return the tensors, by name, that stand for the weight of `module` with this shape [out, in]."""
    rows, columns = shape
    bits, groups = stored.weights.bits, stored.weights.groups(columns)
    words = _words(columns, bits)
    tensors: dict[str, Header] = {f"{module}.weight_scale": ((rows, groups), "")}
    if stored.packed:
        tensors[f"{module}.weight_packed"] = ((rows, words), "I32")
        tensors[f"{module}.weight_shape"] = ((2,), "I64")
    else:
        tensors[f"{module}.weight"] = (shape, "I8")
    if not stored.weights.symmetric:
        zeros = ((_words(rows, bits), groups), "I32") if stored.packed else ((rows, groups), "I8")
        tensors[f"{module}.weight_zero_point"] = zeros
    return tensors


def read_weight(
    checkpoint: Checkpoint, module: str, shape: tuple[int, int], stored: StoredFormat
) -> QuantizedWeight:
    """Return the weight of `module`, whose tensors were checked against `headers`. Raises CheckpointError for
    numbers that the format does not have."""
    rows, columns = shape
    format = stored.weights

    def unsigned(name: str) -> Tensor:
        """Return the numbers of a tensor of int8 as unsigned ones."""
        numbers = checkpoint.integers(name)
        if format.bits == 4 and not bool(((numbers >= -8) & (numbers < 8)).all()):
            checkpoint.refuse(name, "holds numbers of more than 4 bits")
        return (numbers.to(torch.int16) + format.middle).to(torch.uint8)

    scales = checkpoint.tensor([f"{module}.weight_scale"], torch.float32)
    zero_name, zeros = f"{module}.weight_zero_point", None
    if not stored.packed:
        numbers = unsigned(f"{module}.weight")
        zeros = None if format.symmetric else unsigned(zero_name)
        return QuantizedWeight(format, numbers, scales, zeros)
    written = checkpoint.integers(f"{module}.weight_shape").tolist()
    if written != [rows, columns]:
        checkpoint.refuse(f"{module}.weight_shape", f"says {written}, not {[rows, columns]}")
    numbers = unpack(checkpoint.integers(f"{module}.weight_packed"), format.bits, columns)
    if not format.symmetric:
        zeros = unpack(checkpoint.integers(zero_name).T, format.bits, rows).T.contiguous()
    return QuantizedWeight(format, numbers, scales, zeros)


def written_tensors(
    module: str, weight: QuantizedWeight, scale_dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a pack-quantized weight, its scales in a dtype that holds them exactly."""
    bits = weight.format.bits
    yield f"{module}.weight_packed", pack(weight.numbers, bits)
    yield f"{module}.weight_scale", weight.scales.to(scale_dtype)
    yield f"{module}.weight_shape", torch.tensor(weight.numbers.shape, dtype=torch.int64)
    if weight.zeros is not None:
        yield f"{module}.weight_zero_point", pack(weight.zeros.T, bits).T.contiguous()


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Return words (int32) [rows, words] of numbers (uint8) [rows, columns] of 4 or 8 bits, the first number
    in the lowest bits."""
    columns = numbers.shape[1]
    capacity = _words(columns, bits) * (WORD // bits)
    whole = torch.nn.functional.pad(numbers, (0, capacity - columns))
    octets = whole if bits == 8 else whole[:, ::2] | whole[:, 1::2] << 4
    return octets.flatten().view(torch.int32).view(len(numbers), -1)


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the first `columns` numbers (uint8) of each row of `words` (int32), as `pack` packs them."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    return octets[:, :columns].contiguous()


def check_group_index(checkpoint: Checkpoint, module: str, columns: int, group: int | None) -> None:
    """Raise CheckpointError if the module's inputs are not in the order of their groups."""
    name = f"{module}.weight_g_idx"
    if name not in checkpoint:
        return
    index = checkpoint.integers(name)
    if index.dtype not in (torch.int32, torch.int64) or index.shape != (columns,):
        checkpoint.refuse(name, f"must hold {columns} integers of 32 or 64 bits")
    if not torch.equal(index.long(), torch.arange(columns) // (group or columns)):
        raise CheckpointError(
            f"{checkpoint.folder}: {name} orders inputs by activation: only groups in order are supported"
        )


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD)
