"""Quantize keys and values to 8 bits: a vector [dim] is stored as `dim` signed integers, then a float32
scale.

    scale = max |x| / 127        0 if that is below the smallest normal float32; NaN if a number is not finite
    q     = x / scale            rounded to the nearest integer, ties to even; 0 without a scale
    read  = scale · q            rounded to the type that attention computes in

All operations are in float32, and each rounds once, so that the kernels (native/cpp/kv_vectors.h) store the
same bytes.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = 127


def vector_bytes(dim: int, dtype: torch.dtype, quantized: bool) -> int:
    """Return the bytes of one token's key or value [dim] of one head, in `dtype` or `quantized` to 8 bits."""
    return dim + SCALE_BYTES if quantized else dim * dtype.itemsize


def quantize_vectors(vectors: Tensor) -> Tensor:
    """Quantize vectors [..., dim] of any dtype to int8 [..., dim + 4]: `dim` integers, then the 4 bytes of
    the float32 scale."""
    numbers = vectors.float()
    scale = numbers.abs().amax(-1, keepdim=True) / LARGEST
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)
    scale = scale.masked_fill(~scale.isfinite(), torch.nan)
    integers = torch.where(scale > 0, numbers / scale, 0.0).round().to(torch.int8)
    return torch.cat((integers, scale.view(torch.int8)), -1)


def dequantize_vectors(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., dim] of stored vectors int8 [..., dim + 4]."""
    # Copied, because the scale's bytes need not be aligned for a view as float32.
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[..., :-SCALE_BYTES] * scale).to(dtype)
