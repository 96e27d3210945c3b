"""Every path multiplies correctly, and gives a row the same bits with any other rows and any number of
threads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.native.library import Path
from streamserve.execution.backends.native.linear import NativeLinear
from tests.execution.backends.native.paths import EVERY_PATH

CUTS = [
    (0, 1),
    (7, 8),
    (3, 9),
    (0, 16),
    (5, 22),
    (1, 33),
    (0, 48),
    (2, 66),
    (9, 73),
    (64, 130),
    (100, 300),
    (0, 510),
]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 200),
    inputs=st.integers(1, 200),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_sums_are_right_to_float32(pool, path, dtype, rows, outputs, inputs, bias, threads, seed):
    x, w = random((rows, inputs), dtype, seed), random((outputs, inputs), dtype, seed + 1)
    b = random((outputs,), dtype, seed + 2) if bias else None
    linear = NativeLinear(pool(threads, path, dtype), w, b)
    expected = x.double() @ w.double().T + (b.double() if bias else 0)
    size = x.double().abs() @ w.double().abs().T + 1
    wide = linear(x, wide=True)
    assert ((wide.double() - expected).abs() <= 2e-7 * math.sqrt(inputs + 4) * 4 * size).all()
    assert torch.equal(linear(x), wide.to(dtype))


@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0])
def test_wide_outputs_are_multiplied_and_bounded(pool, path, dtype, cap):
    x, w = random((9, 40), dtype, 0), random((75, 40), dtype, 1)
    linear = NativeLinear(pool(2, path, dtype), w)
    expected = 0.7 * linear(x, wide=True).double()
    if cap:
        expected = cap * torch.tanh(expected / cap)
    logits = linear(x, wide=True, scale=0.7, cap=cap)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6 * max(cap, 1))
    assert torch.equal(linear(x[4:5], wide=True, scale=0.7, cap=cap), logits[4:5])
    x[3] = torch.nan
    spoiled = linear(x, wide=True, scale=0.7, cap=cap)
    assert spoiled[3].isnan().all()
    assert spoiled[4:].isfinite().all()


@pytest.mark.each_value
@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (333, 100), (704, 512)])
def test_a_rows_bits_do_not_depend_on_other_rows(pool, path, dtype, outputs, inputs):
    x, w = random((510, inputs), dtype, 0), random((outputs, inputs), dtype, 1)
    together = NativeLinear(pool(1, path, dtype), w)(x, wide=True)
    for threads in (1, 2, 3):
        linear = NativeLinear(pool(threads, path, dtype), w)
        for begin, end in CUTS:
            assert torch.equal(linear(x[begin:end], wide=True), together[begin:end])


def test_random_rows_have_the_bits_of_the_row_alone(pool, available, scale, record):
    """A random row has the bits of the row alone, for random shapes, paths, numbers of threads and other
    rows."""
    rng = np.random.default_rng(scale.seed)
    cases = scale.pick(40, 1000)
    paths = [(path, dtype) for dtype in (torch.bfloat16, torch.float32) for path in available(pool(), dtype)]
    for case in range(cases):
        path, dtype = paths[rng.integers(len(paths))]
        rows, inputs = int(rng.integers(2, 200)), int(rng.integers(1, rng.choice([100, 600, 1500])))
        outputs = int(rng.integers(1, 300))
        x, w = random((rows, inputs), dtype, case), random((outputs, inputs), dtype, case + 1)
        together = NativeLinear(pool(int(rng.integers(1, 4)), path, dtype), w)(x, wide=True)
        linear = NativeLinear(pool(int(rng.integers(1, 4)), path, dtype), w)
        begin = int(rng.integers(rows))
        end = int(rng.integers(begin, rows)) + 1
        assert torch.equal(linear(x[begin:end], wide=True), together[begin:end])
        assert torch.equal(linear(x[begin : begin + 1], wide=True), together[begin : begin + 1])
    record(cases=cases)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_deep_sum_that_is_made_in_parts_has_the_bits_of_the_whole(pool, threads):
    x, w = random((300, 4200), torch.bfloat16, 0), random((700, 4200), torch.bfloat16, 1)
    linear = NativeLinear(pool(threads), w)
    together = linear(x, wide=True)
    torch.testing.assert_close(together, x.float() @ w.float().T, rtol=1e-4, atol=1e-2)
    for begin, end in [(0, 1), (3, 35), (0, 60), (0, 70), (10, 150), (261, 300)]:
        assert torch.equal(linear(x[begin:end], wide=True), together[begin:end])


@pytest.mark.parametrize("path", Path)
def test_other_rows_with_infinities_change_nothing(pool, path):
    x, w = random((40, 96), torch.bfloat16, 0), random((80, 96), torch.bfloat16, 1)
    linear = NativeLinear(pool(2, path), w)
    clean = linear(x)
    x[1::2] = torch.tensor([torch.nan, torch.inf] * 48)
    assert torch.equal(linear(x)[::2], clean[::2])


@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@pytest.mark.parametrize("shape", [(64, 32), (333, 100)])
def test_rows_of_the_weight_are_read_as_they_were(pool, path, dtype, shape):
    w = random(shape, dtype, 0)
    linear = NativeLinear(pool(2, path, dtype), w)
    numbers = torch.randperm(len(w), generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear.rows(numbers), w[numbers])
    assert torch.equal(linear.rows(numbers[::3]), w[numbers[::3]])
    assert linear.rows(numbers[:0]).shape == (0, shape[1])
    for absent in (-1, len(w)):
        with pytest.raises(ValueError, match="rows 0 to"):
            linear.rows(torch.tensor([0, absent]))


def test_rows_may_have_a_stride_and_there_may_be_none(pool):
    x, w = random((5, 96), torch.bfloat16, 0), random((32, 48), torch.bfloat16, 1)
    linear = NativeLinear(pool(), w)
    assert torch.equal(linear(x[:, :48]), linear(x[:, :48].contiguous()))
    assert torch.equal(linear(x.T[:48].T), linear(x[:, :48]))
    assert linear(x[:0, :48]).shape == (0, 32)


def test_what_does_not_fit_is_refused(pool):
    linear = NativeLinear(pool(), random((32, 48), torch.bfloat16, 1))
    with pytest.raises(ValueError, match="takes"):
        linear(torch.zeros(1, 47).bfloat16())
    with pytest.raises(ValueError, match="takes"):
        linear(torch.zeros(1, 48))
    with pytest.raises(ValueError, match="whole layers"):
        NativeLinear(pool(), random((64, 48), torch.bfloat16, 1), paired=True)(torch.zeros(1, 48).bfloat16())


def test_a_thread_pool_takes_the_best_path_up_to_its_own(pool):
    assert pool(1, Path.PORTABLE).path(torch.bfloat16) == Path.PORTABLE
    assert pool(1).path(torch.float32) <= Path.AVX512
    assert pool(1).supports(pool(1).path(torch.bfloat16), torch.bfloat16)
    assert pool(1, Path.AVX2).path(torch.float32) <= Path.AVX2
