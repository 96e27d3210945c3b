"""Rotary position embedding as transformers computes it: angles in float32, rotation in the model's dtype."""

import math

import torch
from torch import Tensor

from streamserve.execution.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return the radians per position of each pair of a head's dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "factors":
        return frequencies / torch.tensor(rope.factors)
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend those between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every row's angles: [rows, 1, head_dim / 2] of `dtype` each."""
    angles = (positions.float()[:, None] * frequencies)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [rows, heads, head_dim] by its rows' angles; dimension i pairs with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
