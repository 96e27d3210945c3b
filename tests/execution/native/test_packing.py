"""Weights are packed where they lie in a file, with the bits of those that are converted or rounded first."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.native.library import Path
from streamserve.execution.native.linear import NativeLinear
from streamserve.execution.quantization import (
    HEAD_FORMAT,
    NotFinite,
    StoredWeight,
    parse_format,
    quantize,
)
from tests.execution.native.paths import EVERY_PATH

STORED = [torch.float32, torch.bfloat16, torch.float16]


def stored(outputs: list[int], width: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """Weights whose groups have ranges of many sizes, on both sides of zero and on one; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows in outputs:
        weight = torch.randn(rows, width, generator=generator)
        weight *= 10 ** torch.empty(rows, 1).uniform_(-4, 2, generator=generator)
        weight[rows // 2 :, : width // 2] = weight[rows // 2 :, : width // 2].abs()
        weight[0], weight[:, -1] = 0.0, 0.0
        parts.append(weight.to(dtype))
    return tuple(parts)


def assert_same(linear: NativeLinear, expected: NativeLinear) -> None:
    assert linear.struct.k_padded == expected.struct.k_padded
    assert linear.format == expected.format
    assert linear._tensors.keys() == expected._tensors.keys()
    for name, tensor in expected._tensors.items():
        assert torch.equal(linear._tensors[name], tensor), name


@pytest.mark.parametrize("path", [Path.PORTABLE, Path.AVX2, Path.AVX512])
@given(
    width=st.integers(1, 300),
    outputs=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    dtype=st.sampled_from(STORED),
    name=st.sampled_from(["int8", "int8:32", "int4", "int4:32", "int4:128", "w8a8"]),
    paired=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_stored_weights_are_rounded_like_tensors(pool, path, width, outputs, dtype, name, paired, seed):
    outputs = outputs * 2 if paired else outputs
    parts, format = stored(outputs, width, dtype, seed), parse_format(name)
    threads = pool(2, path)
    linear = NativeLinear(threads, StoredWeight(parts, torch.bfloat16, format), paired=paired)
    expected = NativeLinear(threads, quantize(torch.cat(parts).float(), format), paired=paired)
    assert_same(linear, expected)
    assert linear.quantized


@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@given(
    width=st.integers(1, 200),
    outputs=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    source=st.sampled_from(STORED),
    seed=st.integers(0, 2**31),
)
def test_stored_floats_are_converted_like_tensors(pool, path, dtype, width, outputs, source, seed):
    parts, threads = stored(outputs, width, source, seed), pool(2, path, dtype)
    linear, whole = NativeLinear(threads, StoredWeight(parts, dtype)), torch.cat(parts).to(dtype)
    assert_same(linear, NativeLinear(threads, whole))
    assert torch.equal(linear.rows(torch.arange(len(whole))), whole)


@pytest.mark.parametrize("format", [None, HEAD_FORMAT, parse_format("int4")], ids=str)
@pytest.mark.parametrize(
    ("source", "value"),
    [(torch.float32, torch.nan), (torch.bfloat16, -torch.inf), (torch.float16, torch.inf)],
)
def test_numbers_that_are_not_finite_are_refused(pool, format, source, value):
    for row, column in ((0, 0), (69, 36), (35, 31)):
        weight = torch.ones(70, 37, dtype=source)
        weight[row, column] = value
        with pytest.raises(NotFinite):
            NativeLinear(pool(2), StoredWeight((weight,), torch.bfloat16, format))


def test_numbers_that_only_float32_holds_are_refused_in_bf16(pool):
    weight = torch.full((3, 40), 3.4e38)
    with pytest.raises(NotFinite):
        NativeLinear(pool(1), StoredWeight((weight,), torch.bfloat16))
    NativeLinear(pool(1), StoredWeight((weight,), torch.float32))


@pytest.mark.parametrize("name", ["int8", "int4:32"])
def test_numbers_in_columns_are_packed_like_those_in_rows(pool, name):
    """The contiguous copy must live until its rows are packed, so it is made large: freed, it is unmapped."""
    weight = quantize(torch.randn(2048, 4096), parse_format(name))
    columns = replace(weight, numbers=weight.numbers.T.contiguous().T)
    assert not columns.numbers.is_contiguous()
    assert_same(NativeLinear(pool(2), columns), NativeLinear(pool(2), weight))
