"""Weights of 8 and 4 bits: the bits of the formula in numpy, on every path, for any rows and threads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.native.library import Path, kernels
from streamserve.execution.native.linear import NativeLinear
from streamserve.execution.quantization import GROUPS, IntegerWeight, WeightFormat, parse_format, quantize

FORMATS = [WeightFormat(bits, group) for bits in (8, 4) for group in GROUPS]


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c rounded once: the product of two float32 is exact in float64, and the sum is rounded from
    there by way of a number that cannot be halfway between two float32 unless the exact sum is."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    # What the sum in float64 lost (two-sum) decides its last bit: so the second rounding is right.
    larger = total - product
    lost = (product - (total - larger)) + (addend - larger)
    bits = total.view(np.int64)
    inexact = (lost != 0) & (bits & 1 == 0)
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, toward, 0)).view(np.float64).astype(np.float32)


def reference(weight: IntegerWeight, x: torch.Tensor) -> np.ndarray:
    """The formula of gemm_int.cpp, float32 [rows, out]."""
    group, width = weight.format.group, weight.numbers.shape[1]
    q = weight.numbers.numpy().astype(np.int64)
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
        if weight.offsets is None:
            offset = 1 << (weight.format.bits - 1)
            t = s * (products - offset * total[:, None]).astype(np.float32)
        else:
            m = weight.offsets[:, number].numpy()[None] * total[:, None].astype(np.float32)
            t = fused(np.broadcast_to(s, products.shape), products.astype(np.float32), m)
        y = fused(np.broadcast_to(scale[:, None], t.shape).astype(np.float32), t, y)
    return y


def make(out: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator)
    weight[:, ::7] *= 20.0  # some inputs have much larger weights
    weight[0] = 0.0
    return weight.to(dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("path", Path)
def test_the_bits_are_those_of_the_formula(pool, path: Path, format: WeightFormat) -> None:
    for out, width, rows in ((64, 64, 1), (200, 300, 7), (130, 448, 33)):
        weight = make(out, width, out, torch.bfloat16)
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        x[-1] = 0.0
        x[0, :64] *= 1e-36  # almost nothing
        expected = reference(quantize(weight, format), x)
        linear = NativeLinear(pool(2, path), weight, format=format)
        assert torch.equal(linear(x, wide=True), torch.from_numpy(expected))


@given(
    rows=st.integers(1, 130), width=st.integers(1, 400), out=st.integers(1, 150),
    format=st.sampled_from(FORMATS), seed=st.integers(0, 2**31), threads=st.integers(1, 3),
)  # fmt: skip
def test_paths_rows_and_threads_change_no_bit(pool, rows, width, out, format, seed, threads) -> None:
    weight = make(out, width, seed, torch.bfloat16)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(seed))
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + 1)).to(torch.bfloat16)
    linears = [
        NativeLinear(pool(threads, path), weight, bias, format=format) for path in (None, Path.PORTABLE)
    ]
    found = [linear(x, wide=True) for linear in linears]
    assert torch.equal(found[0], found[1])
    row = seed % rows
    assert torch.equal(linears[0](x[row : row + 1], wide=True), found[0][row : row + 1])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rounding_is_to_the_nearest_number_of_the_format(format: WeightFormat) -> None:
    weight = make(50, 200, 1, torch.float32)
    rounded = quantize(weight, format)
    error = (rounded.floats()[:, :200] - weight).abs()
    step = rounded.scales.repeat_interleave(format.group, 1)[:, :200]
    assert bool((error <= 0.5001 * step).all())
    assert bool((rounded.floats()[0] == 0).all())
    again = quantize(rounded.floats(), format)
    torch.testing.assert_close(again.floats(), rounded.floats(), rtol=1e-6, atol=1e-6)


def test_a_value_that_is_not_finite_stays_visible(pool) -> None:
    linear = NativeLinear(pool(1), make(64, 128, 2, torch.bfloat16), format=WeightFormat(8, 128))
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    x[0, 5], x[1, 9] = torch.nan, torch.inf
    y = linear(x, wide=True)
    assert bool(y[0, 1:].isnan().all())
    assert not bool(y[1, 1:].isfinite().any())
    assert bool(y[2].isfinite().all())


def test_formats_by_name() -> None:
    assert parse_format("none") is None
    assert parse_format("int8") == WeightFormat(8, 128)
    assert parse_format("int4:32") == WeightFormat(4, 32)
    for wrong in ("int4:48", "int3", "int8:", "int4:-32", "fp8"):
        with pytest.raises(ValueError, match="int4:GROUP"):
            parse_format(wrong)


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if kernels() is None:
        pytest.skip("no kernels on this machine")
