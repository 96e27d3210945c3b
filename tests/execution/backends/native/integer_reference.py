"""The integer kernels' formula in numpy."""

import numpy as np
import torch

from streamserve.execution.formats.quantization import TABLES, QuantizedWeight


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c rounded once: the product of two float32 is exact in float64, and the sum is rounded from
    there by way of a number that cannot be halfway between two float32 unless the exact sum is."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    # The low part lost in the float64 sum (two-sum) sets its last bit, so that the second rounding is right.
    larger = total - product
    lost = (product - (total - larger)) + (addend - larger)
    bits = total.view(np.int64)
    inexact = (lost != 0) & (bits & 1 == 0)
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, toward, 0)).view(np.float64).astype(np.float32)


def reference(weight: QuantizedWeight, x: torch.Tensor) -> np.ndarray:
    """Return the result [rows, out] of gemm_int.cpp's formula in float32."""
    width = weight.numbers.shape[1]
    group, offsets = weight.format.group or width, weight.offsets
    q = weight.numbers.numpy().astype(np.int64)
    middle = 1 << (weight.format.bits - 1)
    if weight.format.table:
        q, middle = np.array(TABLES[weight.format.table])[q], 0
    values = np.zeros((len(x), width), np.float32)
    values[:, : x.shape[1]] = x.float().numpy()
    y = np.zeros((len(x), len(q)), np.float32)
    for number, begin in enumerate(range(0, width, group)):
        part = values[:, begin : begin + group]
        top = np.abs(part).max(1)
        some = top >= np.float32(1e-35)
        inverse = np.where(some, np.float32(127) / np.where(some, top, 1), 0).astype(np.float32)
        rounded = np.rint(part * inverse[:, None]).astype(np.int64)
        scale, total = top / np.float32(127), rounded.sum(1)
        products = rounded @ q[:, begin : begin + group].T
        s = weight.scales[:, number].numpy()[None]
        if offsets is None:
            t = s * (products - middle * total[:, None]).astype(np.float32)
        else:
            m = offsets[:, number].numpy()[None] * total[:, None].astype(np.float32)
            t = fused(np.broadcast_to(s, products.shape), products.astype(np.float32), m)
        y = fused(np.broadcast_to(scale[:, None], t.shape).astype(np.float32), t, y)
    return y


def make(out: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator)
    weight[:, ::7] *= 20.0  # Some inputs have much larger weights.
    weight[0] = 0.0
    return weight.to(dtype)
