"""Unpack the blocks of GGUF's tensor types to integers with scales, without rounding. A number of the file
equals scale · (q - middle) or scale · q + minimum in the WeightFormat of its type (FORMATS, quantization.py).

    block      bytes                                                    number, in float32
    Q4_0       d: f16, 16 bytes of halves                               d · (q - 8)
    Q4_1       d, m: f16, halves                                        d · q + m
    Q5_0       d: f16, 4 bytes of fifth bits, halves                    d · (q - 16)
    Q5_1       d, m: f16, fifth bits, halves                            d · q + m
    Q8_0       d: f16, 32 signed bytes                                  d · q
    IQ4_NL     d: f16, halves                                           d · IQ4[q]
    MXFP4      e: an exponent, halves                                   2^(e - 128) · MXFP4[q]
    IQ4_XS     d: f16, 8 scales s of 6 bits, 8 · 16 halves              d · (s - 32) · IQ4[q]
    Q2_K       16 (s, m) of 4 bits, 64 bytes of quarters, d, dmin: f16  d · s · q - dmin · m
    Q3_K       32 bytes of third bits, quarters, 16 s of 6 bits, d      d · (s - 32) · (q - 4)
    Q4_K       d, dmin: f16, 8 (s, m) of 6 bits, 128 bytes of halves    d · s · q - dmin · m
    Q5_K       as Q4_K, with 32 bytes of fifth bits before the halves   d · s · q - dmin · m
    Q6_K       halves, 64 bytes of quarters, 16 s: i8, d                d · s · (q - 32)

IQ4 and MXFP4 are tables (quantization.TABLES). Halves are numbers of 4 bits: first the lower 4 bits of all
bytes of a run, then the upper ones. Quarters are numbers of 2 bits in the same manner. All products of d and
s have at most 19 bits, so they are exact in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from streamserve.execution.formats.quantization import QuantizedWeight, WeightFormat

FORMATS = {
    "Q4_0": WeightFormat(4, 32, True), "Q4_1": WeightFormat(4, 32, False, precise=True),
    "Q5_0": WeightFormat(8, 32, True), "Q5_1": WeightFormat(8, 32, False, precise=True),
    "Q8_0": WeightFormat(8, 32, True), "IQ4_NL": WeightFormat(4, 32, True, table="iq4"),
    "MXFP4": WeightFormat(4, 32, True, table="mxfp4"),
    "IQ4_XS": WeightFormat(4, 32, True, precise=True, table="iq4", levels=True),
    "Q2_K": WeightFormat(4, 16, False, precise=True, levels=True),
    "Q3_K": WeightFormat(4, 16, True, precise=True, levels=True),
    "Q4_K": WeightFormat(4, 32, False, precise=True, levels=True),
    "Q5_K": WeightFormat(8, 32, False, precise=True, levels=True),
    "Q6_K": WeightFormat(8, 16, True, precise=True, levels=True),
}  # fmt: skip

Unpacked = tuple[Tensor, Tensor, Tensor | None]
"""Numbers [blocks, numbers a block] (uint8), and scales and minimums [blocks, groups a block] (float32)."""


def unpack(name: str, blocks: Tensor) -> QuantizedWeight:
    """Return the weight in `blocks` of the type `name`, uint8 [rows, blocks a row, bytes a block]."""
    rows = len(blocks)
    numbers, scales, minimums = _UNPACK[name](blocks.flatten(0, 1))
    return QuantizedWeight(
        FORMATS[name],
        numbers.reshape(rows, -1),
        scales.reshape(rows, -1),
        minimums=None if minimums is None else minimums.reshape(rows, -1),
    )


def _half(data: Tensor) -> Tensor:
    """Return float16 numbers, two bytes each, as float32."""
    return data.contiguous().view(torch.float16).float()


def _bits(data: Tensor, width: int, run: int) -> Tensor:
    """Return unsigned integers of `width` bits [blocks, bytes · 8 / width]: in each `run` of bytes first the
    lowest bits of all bytes, then the next higher bits of all bytes, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    parts: Tensor = data.reshape(len(data), -1, 1, run) >> shifts & (1 << width) - 1
    return parts.flatten(1)


def _in_order(data: Tensor, width: int) -> Tensor:
    """Return unsigned integers of `width` bits, byte by byte, in each byte from the lowest bits on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (data[:, :, None] >> shifts & (1 << width) - 1).flatten(1)


def _q4_0(blocks: Tensor) -> Unpacked:
    return _bits(blocks[:, 2:], 4, 16), _half(blocks[:, :2]), None


def _q4_1(blocks: Tensor) -> Unpacked:
    return _bits(blocks[:, 4:], 4, 16), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Unpacked:
    numbers = _bits(blocks[:, 6:], 4, 16) | _in_order(blocks[:, 2:6], 1) << 4
    return numbers + (128 - 16), _half(blocks[:, :2]), None


def _q5_1(blocks: Tensor) -> Unpacked:
    numbers = _bits(blocks[:, 8:], 4, 16) | _in_order(blocks[:, 4:8], 1) << 4
    return numbers, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, 2:] ^ 128, _half(blocks[:, :2]), None


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return _bits(blocks[:, 2:], 4, 16), _half(blocks[:, :2]), None


def mxfp4_scales(exponents: Tensor) -> Tensor:
    """Return 2^(e - 128) in float32 for exponents of MXFP4 (uint8): the scales of indices of its table."""
    # Made from bits: for e of 0 and 1 the result is below 2^-126, a subnormal number with exponent bits of 0.
    wide = exponents.to(torch.int32)
    return torch.where(wide < 2, 1 << 21 + wide, wide - 1 << 23).view(torch.float32)


def _mxfp4(blocks: Tensor) -> Unpacked:
    return _bits(blocks[:, 1:], 4, 16), mxfp4_scales(blocks[:, :1]), None


def _iq4_xs(blocks: Tensor) -> Unpacked:
    scales = _in_order(blocks[:, 4:8], 4) | _in_order(blocks[:, 2:4], 2) << 4
    return _bits(blocks[:, 8:], 4, 16), _half(blocks[:, :2]) * (scales.float() - 32), None


def _q2_k(blocks: Tensor) -> Unpacked:
    packed, d, least = blocks[:, :16], _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    return _bits(blocks[:, 16:80], 2, 32), d * (packed & 15), -(least * (packed >> 4))


def _q3_k(blocks: Tensor) -> Unpacked:
    low, high = _bits(blocks[:, 96:104], 4, 8), _bits(blocks[:, 104:108], 2, 4)
    scales = (low | high << 4).float() - 32
    # A number is q - 4 with q of 3 bits; the format has 4 bits with middle 8, so 4 is added.
    numbers = _bits(blocks[:, 32:96], 2, 32) + (_bits(blocks[:, :32], 1, 32) << 2) + 4
    return numbers, _half(blocks[:, 108:110]) * scales, None


def _scales_and_minimums(packed: Tensor, d: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums [blocks, 8] of Q4_K and Q5_K, times `d` and `least`. `packed` has 12 bytes
    for 16 numbers of 6 bits. The last four scales and minimums have their upper two bits in the upper bits of
    the first eight bytes."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, last & 15 | first >> 2 & 48], 1)
    minimums = torch.cat([second & 63, last >> 4 | second >> 2 & 48], 1)
    return d * scales, -(least * minimums)


def _q4_k(blocks: Tensor) -> Unpacked:
    d, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    return _bits(blocks[:, 16:], 4, 32), *_scales_and_minimums(blocks[:, 4:16], d, least)


def _q5_k(blocks: Tensor) -> Unpacked:
    d, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    numbers = _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return numbers, *_scales_and_minimums(blocks[:, 4:16], d, least)


def _q6_k(blocks: Tensor) -> Unpacked:
    numbers = _bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return numbers + (128 - 32), _half(blocks[:, 208:210]) * scales, None


_UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4, "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
