"""With weights in e4m3 (8-bit floats), every path has the bits of the formula in numpy, for any rows and
threads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.native.library import Path, kernels
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.formats.quantization import GROUPS, QuantizedWeight, WeightFormat, quantize
from tests.execution.backends.native.integer_reference import fused, make

FORMATS = [WeightFormat(8, group, symmetric=True, floating=True) for group in (*GROUPS, None)]
NOT_NUMBERS = (0x7F, 0xFF)


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if kernels() is None:
        pytest.skip("no kernels on this machine")


def random(rows: int, width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(weight: QuantizedWeight, x: torch.Tensor, path: Path) -> np.ndarray:
    """The formula of gemm_fma.cpp for x of bfloat16, float32 [rows, out]. Products of bfloat16 and e4m3 are
    exact in float32, so that only the scaled sum may be rounded once, or twice as in portable C++. Inputs are
    added pair by pair, the second of a pair first."""
    width = weight.numbers.shape[1]
    group = weight.format.group or width
    floats = weight.numbers.view(torch.float8_e4m3fn).float().numpy()
    values, scales = x.float().numpy(), weight.scales.numpy()
    y = np.zeros((len(x), len(floats)), np.float32)
    for number, begin in enumerate(range(0, width, group)):
        total = np.zeros_like(y)
        for k in sorted(range(begin, min(begin + group, width)), key=lambda k: k ^ 1):
            total += values[:, k : k + 1] * floats[None, :, k]
        s = np.broadcast_to(scales[None, :, number], total.shape)
        y = s * total + y if path == Path.PORTABLE else fused(s, total, y)
    return y


@pytest.mark.parametrize("path", Path)
def test_every_number_of_the_format_is_exact(pool, path: Path) -> None:
    codes = torch.tensor([code for code in range(256) if code not in NOT_NUMBERS], dtype=torch.uint8)
    numbers = torch.zeros(len(codes), 64, dtype=torch.uint8)
    numbers[:, 5] = codes
    linear = NativeLinear(pool(1, path), QuantizedWeight(FORMATS[-1], numbers, torch.ones(len(codes), 1)))
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 1.0
    assert torch.equal(linear(x, wide=True)[0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.each_value
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("path", Path)
def test_the_bits_are_those_of_the_formula(pool, path: Path, format: WeightFormat) -> None:
    for out, width, rows in ((64, 64, 1), (200, 300, 7), (130, 448, 70)):
        rounded = quantize(make(out, width, out, torch.bfloat16), format)
        x = random(rows, width, rows)
        linear = NativeLinear(pool(2, path), rounded)
        assert linear.format == "fp8"
        assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(rounded, x, path)))


@given(
    rows=st.integers(1, 130), width=st.integers(1, 600), out=st.integers(1, 150),
    format=st.sampled_from(FORMATS), seed=st.integers(0, 2**31), threads=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_rows_and_threads_change_no_bit(pool, rows, width, out, format, seed, threads, dtype) -> None:
    weight, bias = quantize(make(out, width, seed, torch.bfloat16), format), random(1, out, seed)[0]
    x = random(rows, width, seed + 1, dtype)
    for path in (None, Path.PORTABLE):
        alone = NativeLinear(pool(1, path), weight, bias, dtype=dtype)
        together = NativeLinear(pool(threads, path), weight, bias, dtype=dtype)(x, wide=True)
        exact = x.double() @ weight.floats().double().T + bias.double()
        size = x.double().abs() @ weight.floats().double().abs().T + 1
        assert bool(((together - exact).abs() <= 1e-6 * size).all())
        row = seed % rows
        assert torch.equal(alone(x[row : row + 1], wide=True), together[row : row + 1])
        assert torch.equal(alone(x[row:], wide=True), together[row:])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rounding_is_to_a_near_number_of_the_format(format: WeightFormat) -> None:
    weight = make(50, 200, 1, torch.float32)
    rounded = quantize(weight, format)
    floats = rounded.floats()
    # the smallest positive number of the format, 2^-9, times the scale
    step = rounded.scales.repeat_interleave(format.group or 200, 1)[:, :200] * 2.0**-9
    assert bool(((floats - weight).abs() <= 2.0**-4 * weight.abs() * 1.01 + step).all())
    assert bool((floats[0] == 0).all())
    assert torch.equal(quantize(floats, format).floats(), floats)
