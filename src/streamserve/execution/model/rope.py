"""Rotary position embedding as transformers computes it: angles in float32, rotation in the model's dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.model.rope_spec import QueryScaling, RopeSpec


@dataclass(frozen=True)
class Rotations:
    """Several rotary embeddings: `frequencies` [embeddings, dim / 2] in float32, and `amplitudes`
    [embeddings, 1, 1], by which cosines and sines are multiplied."""

    frequencies: Tensor
    amplitudes: Tensor

    @classmethod
    def of(cls, ropes: Sequence[RopeSpec], dim: int) -> "Rotations":
        """Return the rotations of the embeddings `ropes`, each over `dim` dimensions."""
        frequencies = torch.empty(len(ropes), dim // 2)
        for number, rope in enumerate(ropes):
            frequencies[number] = inverse_frequencies(rope, dim)
        return cls(frequencies, torch.tensor([rope.amplitude for rope in ropes]).view(-1, 1, 1))

    def to(self, device: torch.device) -> "Rotations":
        return Rotations(self.frequencies.to(device), self.amplitudes.to(device))

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rows' angles, each [embeddings, rows, dim / 2] in `dtype`."""
        angles = positions.to(self.frequencies.dtype)[:, None] * self.frequencies[:, None]
        return (angles.cos() * self.amplitudes).to(dtype), (angles.sin() * self.amplitudes).to(dtype)

    def table(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions below `count`, as `at` does. The last bit may differ:
        only operations that every processor rounds alike are used, unlike in libraries' cosines."""
        positions = torch.arange(count, dtype=self.frequencies.dtype)
        cos, sin = (
            torch.empty(len(self.frequencies), count, self.frequencies.shape[1], dtype=dtype)
            for _ in range(2)
        )
        for first in range(0, count, _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            angles = positions[some, None] * self.frequencies[:, None]
            for to, values in zip((cos, sin), _cos_and_sin(angles.double()), strict=True):
                to[:, some] = (values.float() * self.amplitudes).to(dtype)
        return cos, sin


_AT_ONCE = 256
"""Positions computed at a time, so that the intermediate results stay in a processor's cache."""


_QUARTER = (1.5707963267341256, 6.077100506506192e-11)
"""π/2 in two parts. The first one has few bits: its products with integers below 2^20 are exact in
float64."""


def _cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of float64 angles below a million, with errors of some 1e-16. Each angle is
    reduced to an eighth of a turn around the nearest quarter, where Taylor series take sums and products."""
    quarters = torch.round(angles * (2 / math.pi))
    rest = (angles - quarters * _QUARTER[0]) - quarters * _QUARTER[1]
    square = rest * rest
    cos, sin = torch.zeros_like(rest), torch.zeros_like(rest)
    for order in range(8, -1, -1):
        cos = cos * square + (-1) ** order / math.factorial(2 * order)
        sin = sin * square + (-1) ** order / math.factorial(2 * order + 1)
    sin, turned = sin * rest, quarters.long() % 4
    odd = turned % 2 == 1
    cosines, sines = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    return torch.where((turned == 1) | (turned == 2), -cosines, cosines), torch.where(
        turned >= 2, -sines, sines
    )


def distinct_ropes(ropes: Sequence[RopeSpec | None]) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """Return the distinct rotary embeddings of a model's layers, and the index of each layer's one (-1: the
    layer has none)."""
    distinct = tuple(dict.fromkeys(rope for rope in ropes if rope))
    return distinct, tuple(distinct.index(rope) if rope else -1 for rope in ropes)


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Return the radians per position of each pair of `dim` rotated dimensions: float32 [dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.scaling == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "factors":
        return frequencies / torch.tensor(rope.factors)
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies, dim)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Return frequencies whose long wavelengths are stretched by `factor` and short wavelengths unchanged; in
    between, the two are blended."""
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


def _yarn(rope: RopeSpec, frequencies: Tensor, dim: int) -> Tensor:
    """Return frequencies with long wavelengths stretched by `factor` and short wavelengths kept. Wavelengths
    in between are blended linearly by dimension. Source: YaRN (arXiv 2309.00071), section 3.2."""

    def dimension(turns: float) -> float:
        """Return the pair of dimensions that makes `turns` turns in `original_positions`, as a fraction."""
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def query_scales(scaling: QueryScaling, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of the queries at `positions` (int64): [rows] in `dtype`. The logarithm is Python's,
    because the last bit of torch's depends on the processor."""
    steps = positions // scaling.positions
    count = int(steps.max()) + 1 if len(steps) else 0
    factors = torch.tensor([1 + scaling.beta * math.log(1 + step) for step in range(count)])
    return factors.to(positions.device, dtype)[steps]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [rows, heads, head_dim] with the first `dim` dimensions rotated by the rows' angles. `cos`
    and `sin` are [rows, dim / 2]; dimension i pairs with i + dim / 2."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
