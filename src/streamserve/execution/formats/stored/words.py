"""Pack numbers of 4 or 8 bits into 32-bit words, the first number in the lowest bits."""

import torch
from torch import Tensor

WORD = 32
"""Bits of a word."""


def words(count: int, bits: int) -> int:
    """Return the number of words for `count` numbers of `bits` bits."""
    return -(-count * bits // WORD)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Return `numbers` (uint8) [rows, columns] of 4 or 8 bits as words (int32) [rows, words]."""
    columns = numbers.shape[1]
    capacity = words(columns, bits) * (WORD // bits)
    whole = torch.nn.functional.pad(numbers, (0, capacity - columns))
    octets = whole if bits == 8 else whole[:, ::2] | whole[:, 1::2] << 4
    return octets.flatten().view(torch.int32).view(len(numbers), -1)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the first `columns` numbers (uint8) of each row of words (int32): the inverse of `pack`."""
    octets = packed.flatten().view(torch.uint8).view(len(packed), -1)
    if bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    return octets[:, :columns].contiguous()
