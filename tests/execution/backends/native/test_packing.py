"""Weights that are packed directly from a file have the bits of weights that are converted or rounded
first."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.native import packing
from streamserve.execution.backends.native.library import Path, ScaleType
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.formats.gguf.blocks import FORMATS, unpack
from streamserve.execution.formats.quantization import (
    HEAD_FORMAT,
    BlockRows,
    BlockWeight,
    NotFinite,
    QuantizedWeight,
    StoredWeight,
    StripedWeight,
    WeightFormat,
    common_format,
    join,
    join_strips,
    parse_format,
    quantize,
    widen,
)
from tests.execution.backends.native.integer_reference import reference
from tests.execution.backends.native.paths import EVERY_PATH
from tests.ggufs import SCALES, Type, random_blocks

STORED = [torch.float32, torch.bfloat16, torch.float16]


def stored(outputs: list[int], width: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """Return weights whose groups have ranges of many sizes, on both sides of zero and on one side; some are
    zero."""
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
    """Numbers stored in columns are packed like numbers in rows. The contiguous copy must live until its rows
    are packed, so it is large: memory of that size is unmapped when freed."""
    weight = quantize(torch.randn(2048, 4096), parse_format(name))
    columns = replace(weight, numbers=weight.numbers.T.contiguous().T)
    assert not columns.numbers.is_contiguous()
    assert_same(NativeLinear(pool(2), columns), NativeLinear(pool(2), weight))


@pytest.mark.parametrize("path", [Path.PORTABLE, Path.AVX2, Path.AVX512])
@given(
    width=st.integers(1, 300),
    outputs=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    name=st.sampled_from(["int8", "int4", "int4:32", "w8a8", "fp8"]),
    paired=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_strips_are_packed_like_the_whole(pool, path, width, outputs, name, paired, seed):
    outputs = outputs * 2 if paired else outputs
    format = WeightFormat(8, 128, True, floating=True) if name == "fp8" else parse_format(name)
    weights = [quantize(part, format) for part in stored(outputs, width, torch.float32, seed)]
    threads, read = pool(2, path), []

    def striped(weight: QuantizedWeight) -> StripedWeight:
        def numbers(first: int, last: int) -> torch.Tensor:
            assert 0 <= first < last <= len(weight.numbers)
            read.append(last - first)
            return weight.numbers[first:last]

        return StripedWeight(format, weight.shape, numbers, weight.scales, weight.zeros)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "STRIP", 64)
        strips = NativeLinear(threads, join_strips([striped(weight) for weight in weights]), paired=paired)
    assert_same(strips, NativeLinear(threads, join(weights), paired=paired))
    assert sum(read) == sum(outputs)
    assert max(read) <= 128


KINDS = [("Q4_0",), ("Q4_K", "Q6_K"), ("MXFP4", "Q8_0"), ("IQ4_NL", "IQ4_XS"), ("IQ4_XS", "Q5_K", "Q2_K")]
"""Combinations of types that are joined; each type also occurs alone."""


def block_rows(kinds: Sequence[str], rows: int, columns: int, seed: int) -> tuple[BlockRows, ...]:
    """Return parts with this number of rows each; every other part has its rows in another order."""
    parts = []
    for number, kind in enumerate(kinds):
        order = np.random.default_rng(seed).permutation(rows) if number % 2 else None
        parts.append(BlockRows(kind, random_blocks(kind, rows, columns, seed + number), order))
    return tuple(parts)


def unpacked(weight: BlockWeight) -> QuantizedWeight:
    """Return the weight as gguf/blocks.py reads it."""
    parts = []
    for part in weight.parts:
        blocks = part.blocks if part.order is None else part.blocks[part.order]
        shape = (len(blocks), -1, GGML_QUANT_SIZES[Type[part.kind]][1])
        parts.append(widen(unpack(part.kind, torch.from_numpy(blocks).view(shape)), weight.format))
    return join(parts)


def products(linear: NativeLinear, name: str) -> torch.Tensor:
    """Return the scales or offsets [out / 64, groups, 64] that a table of two levels stands for."""
    table = linear._tensors[name]
    panels, supers, _ = table.shape
    upper = table[:, :, :128].contiguous().view(torch.float16).float()
    numbers = table[:, :, 128:].contiguous().view(torch.int8).float()
    return (upper[:, :, None] * numbers.view(panels, supers, -1, 64)).flatten(1, 2)


@pytest.mark.each_pair
@pytest.mark.parametrize("path", [Path.PORTABLE, Path.AVX2, Path.AVX512])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in FORMATS), *KINDS], ids=" ".join)
@pytest.mark.parametrize(("rows", "paired"), [(1, False), (96, True), (130, False)])
def test_blocks_are_packed_like_their_integers(pool, path, kinds, rows, paired):
    columns = 512 if any(FORMATS[kind].precise for kind in kinds) else 96
    kinds = kinds * 2 if paired else kinds
    weight = BlockWeight(
        block_rows(kinds, rows, columns, seed=rows), columns, common_format([FORMATS[kind] for kind in kinds])
    )
    threads = pool(2, path)
    linear = NativeLinear(threads, weight, paired=paired)
    expected = NativeLinear(threads, unpacked(weight), paired=paired)
    assert (linear.struct.scale_type == ScaleType.LEVELS) == weight.format.levels
    if weight.format.levels:
        for name in ("scales", "offsets"):
            if name in expected._tensors:
                assert torch.equal(products(linear, name), expected._tensors[name])
        assert torch.equal(linear._tensors["weight"], expected._tensors["weight"])
        assert linear._tensors.keys() == expected._tensors.keys()
        assert linear.nbytes < expected.nbytes
    else:
        assert_same(linear, expected)
        assert linear.struct.scale_type == expected.struct.scale_type
    for name in ("bits", "group", "k_padded"):
        assert getattr(linear.struct, name) == getattr(expected.struct, name)
    assert linear.quantized


@pytest.mark.each_value
@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("kinds", [*((kind,) for kind in FORMATS), ("Q4_K", "Q6_K")], ids=" ".join)
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_blocks_give_the_bits_of_the_formula(pool, path, kinds, count):
    weight = BlockWeight(
        block_rows(kinds, 70, 768, seed=count), 768, common_format([FORMATS[kind] for kind in kinds])
    )
    x = torch.randn(count, 768, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)
    linear = NativeLinear(pool(2, path), weight)
    assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(unpacked(weight), x)))
    outputs = linear.struct.n_padded
    if weight.format.levels:
        assert linear.nbytes == weight.format.nbytes(outputs, 768) + 16 * bool(weight.format.table)


def test_scales_that_two_levels_do_not_hold_are_in_float32(pool):
    """The minimum of a symmetric group is 128 times its scale: the float16 of large scales cannot hold it."""
    parts = block_rows(("Q4_K", "Q6_K"), 64, 256, seed=5)
    parts[1].blocks[:, 208:210] = np.array([1000.0], np.float16).view(np.uint8)
    weight = BlockWeight(parts, 256, common_format([FORMATS["Q4_K"], FORMATS["Q6_K"]]))
    assert weight.format.levels
    linear = NativeLinear(pool(1), weight)
    assert linear.struct.scale_type == ScaleType.FLOAT32
    assert_same(linear, NativeLinear(pool(1), unpacked(weight)))


@pytest.mark.parametrize("exponents", [(0, 1), (1, 120), (30, 120)])
def test_powers_that_a_short_type_does_not_hold_are_exact(pool, exponents):
    """Powers that a short type cannot hold are exact: MXFP4 scales that are subnormal in float32, or outside
    of float16."""
    for kinds in (("MXFP4",), ("MXFP4", "Q8_0")):
        parts = block_rows(kinds, 64, 64, seed=3)
        parts[0].blocks.reshape(64, 2, -1)[:, :, 0] = exponents
        weight = BlockWeight(parts, 64, common_format([FORMATS[kind] for kind in kinds]))
        expected = unpacked(weight)
        linear = NativeLinear(pool(1), weight)
        scales = linear._tensors["scales"].float()
        if linear.struct.scale_type == ScaleType.E8M0:
            scales = (linear._tensors["scales"].int() << 23).view(torch.float32)
        assert torch.equal(scales.permute(0, 2, 1).flatten(0, 1), expected.scales)
        assert torch.equal(linear._tensors["weight"], NativeLinear(pool(1), expected)._tensors["weight"])


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_blocks_with_a_scale_that_is_not_finite_are_refused(pool, kind):
    for row in (0, 69):
        (part,) = block_rows([kind], 70, 512, seed=1)
        last = part.blocks.reshape(70, -1, GGML_QUANT_SIZES[Type[kind]][1])[row, -1]
        if kind == "MXFP4":
            last[0] = 250  # Multiplied by 256 it is not finite.
        else:
            last[SCALES[kind][0] : SCALES[kind][0] + 2] = np.array([np.inf], np.float16).view(np.uint8)
        with pytest.raises(NotFinite):
            NativeLinear(pool(2), BlockWeight((part,), 512, FORMATS[kind]))
