"""8-bit keys and values equal a plain numpy reference, and are close to the numbers that were written."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamserve.execution.compute.kv_vectors import dequantize_vectors, quantize_vectors, vector_bytes
from tests.execution.kv_reference import SMALLEST, reference_bytes, reference_numbers

DTYPES = [torch.float32, torch.bfloat16]


finite = arrays.arrays(
    np.float32, st.integers(1, 80), elements=st.floats(-(2.0**100), 2.0**100, width=32)
) | arrays.arrays(np.float32, st.integers(1, 80), elements=st.floats(-3, 3, width=32))


@given(numbers=finite, dtype=st.sampled_from(DTYPES))
def test_numbers_move_by_half_a_scale_at_most(numbers, dtype):
    vector = torch.from_numpy(numbers).to(dtype)
    stored = quantize_vectors(vector)
    assert stored.dtype == torch.int8
    assert stored.nbytes == vector_bytes(len(vector), dtype, True)
    scale = float(stored[-4:].clone().view(torch.float32))
    assert scale == pytest.approx(float(vector.float().abs().max()) / 127, rel=1e-6) or scale == 0
    error = (dequantize_vectors(stored, torch.float32).double() - vector.double()).abs().max()
    # Half a step, and the float32 rounding error of 127 steps.
    assert error <= (scale * (0.5 + 1e-4) if scale else 127 * SMALLEST)


@given(numbers=finite, dtype=st.sampled_from(DTYPES))
def test_stored_bytes_are_the_references(numbers, dtype):
    vectors = torch.from_numpy(numbers).to(dtype).repeat(2, 3, 1)
    assert torch.equal(quantize_vectors(vectors), reference_bytes(vectors))
    assert torch.equal(dequantize_vectors(quantize_vectors(vectors), dtype), reference_numbers(vectors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vector", [[0.0] * 8, [1e-38, -1e-39] * 4], ids=["zeros", "tiny"])
def test_zeros_and_numbers_without_a_normal_scale_are_read_as_zero(vector, dtype):
    stored = quantize_vectors(torch.tensor(vector, dtype=dtype))
    assert not stored.any()
    assert not dequantize_vectors(stored, dtype).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_with_a_number_that_is_not_finite_is_read_as_nan(bad):
    vectors = torch.randn(2, 8)
    vectors[0, 3] = bad
    read = dequantize_vectors(quantize_vectors(vectors), torch.float32)
    assert read[0].isnan().all()
    assert read[1].isfinite().all()


def test_halves_are_rounded_to_even():
    stored = quantize_vectors(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]))
    assert stored[:-4].tolist() == [127, 0, 2, 2, 0, -2, -127]
