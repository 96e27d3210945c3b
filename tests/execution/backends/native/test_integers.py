"""With 8-bit and 4-bit weights, every path has the bits of the formula in numpy, for any rows and threads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from streamserve.execution.backends.native.library import Path, ScaleType, kernels
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.formats.quantization import (
    GROUPS,
    MAX_INPUTS,
    QuantizedWeight,
    Table,
    WeightFormat,
    common_format,
    parse_format,
    quantize,
    widen,
)
from tests.conftest import Scale
from tests.execution.backends.native.integer_reference import make, reference

FORMATS = [
    WeightFormat(bits, group, symmetric)
    for bits in (8, 4)
    for group in (16, *GROUPS, None)
    for symmetric in (True, False)
]
IDS = [f"{format}-{'symmetric' if format.symmetric else 'zeros'}" for format in FORMATS]


@pytest.mark.each_value
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize("path", Path)
def test_the_bits_are_those_of_the_formula(pool, path: Path, format: WeightFormat) -> None:
    for out, width, rows in ((64, 64, 1), (200, 300, 7), (130, 448, 33)):
        weight = make(out, width, out, torch.bfloat16)
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        x[-1] = 0.0
        x[0, :64] *= 1e-36  # almost nothing
        rounded = quantize(weight, format)
        expected = reference(rounded, x)
        linear = NativeLinear(pool(2, path), rounded)
        assert torch.equal(linear(x, wide=True), torch.from_numpy(expected))


def indices(table: Table, out: int, width: int, group: int = 32, precise: bool = False) -> QuantizedWeight:
    """Return a weight with any indices, and scales that are powers of two, or any numbers of float16 or
    float32."""
    generator = torch.Generator().manual_seed(out)
    scales = torch.exp2(torch.randint(-9, -4, (out, -(-width // group)), generator=generator).float())
    if table == "iq4":
        scales = scales * torch.rand(scales.shape, generator=generator)
        scales = scales if precise else scales.half().float()
    format = WeightFormat(4, group, symmetric=True, precise=precise, table=table)
    numbers = torch.randint(0, 16, (out, width), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(format, numbers, scales)


@pytest.mark.parametrize(
    ("table", "group", "precise"), [("mxfp4", 32, False), ("iq4", 16, True), ("iq4", 32, False)]
)
@pytest.mark.parametrize("path", Path)
def test_indices_give_the_bits_of_the_numbers_in_their_table(
    pool, path: Path, table: Table, group: int, precise: bool
) -> None:
    for out, width, rows in ((64, 64, 1), (200, 288, 7), (130, 448, 33)):
        weight = indices(table, out, width, group, precise)
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        linear = NativeLinear(pool(2, path), weight)
        y = linear(x, wide=True)
        assert torch.equal(y, torch.from_numpy(reference(weight, x)))
        whole = widen(weight, WeightFormat(8, group, symmetric=True, precise=precise))
        assert torch.equal(whole.floats(), weight.floats())
        assert torch.equal(NativeLinear(pool(2, path), whole)(x, wide=True), y)
        if width % 64 == 0 and out % 64 == 0:
            table_bytes = 16
            assert linear.nbytes == weight.format.nbytes(out, width) + table_bytes


def test_scales_that_are_no_powers_of_two_are_kept(pool) -> None:
    """Scales that are not powers of two are stored exactly. The smallest powers, which are subnormal in
    float32, are stored in 16 bits, other scales in 32 bits."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for factor, kind in ((1.0, ScaleType.E8M0), (2.0**-122, ScaleType.BFLOAT16), (1.1, ScaleType.FLOAT32)):
        weight = indices("mxfp4", 64, 64)
        weight = replace(weight, scales=weight.scales * factor)
        linear = NativeLinear(pool(1, None), weight)
        assert linear.struct.scale_type == kind
        assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(weight, x)))


def test_indices_are_joined_with_other_formats() -> None:
    mxfp4, iq4 = WeightFormat(4, 32, True, table="mxfp4"), WeightFormat(4, 32, True, table="iq4")
    precise = replace(iq4, precise=True)
    assert common_format([mxfp4, mxfp4]) == mxfp4
    assert common_format([iq4, precise]) == precise
    assert common_format([mxfp4, iq4]) == WeightFormat(8, 32, True)
    assert common_format([mxfp4, WeightFormat(4, 32, True)]) == WeightFormat(8, 32, True)
    for format in (precise, WeightFormat(8, 16, True), WeightFormat(8, 32, False, precise=True)):
        weight = indices("iq4", 64, 64)
        found = widen(weight, format).floats()
        torch.testing.assert_close(found, weight.floats(), rtol=0, atol=0 if format.symmetric else 1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_of_any_type_are_exact(pool, path: Path, format: WeightFormat, dtype: torch.dtype) -> None:
    """Scales of any type are exact: scales of float16, subnormal ones included, are stored in 16 bits, others
    in 32 bits."""
    rounded = quantize(make(130, 200, 5, torch.bfloat16), format)
    noise = torch.rand(rounded.scales.shape, generator=torch.Generator().manual_seed(2)) * 0.1
    scales = (noise * torch.where(noise < 0.05, 1e-4, 1.0)).to(dtype).float()
    rounded = replace(rounded, scales=scales)
    linear = NativeLinear(pool(2, path), rounded)
    narrow = dtype == torch.float16 and not format.wide_tables
    assert linear.struct.scale_type == (ScaleType.FLOAT16 if narrow else ScaleType.FLOAT32)
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(rounded, x)))


def test_paths_rows_splits_and_threads_change_no_bit(pool, available, scale: Scale, record) -> None:
    """Paths, rows, splits and threads change no bit: in random cases all paths give equal results, and each
    row equals the row alone or in another part of the batch."""
    rng, cases, compared = np.random.default_rng(scale.seed), scale.pick(15, 1000), 0
    paths = available(pool(), torch.bfloat16)
    for _ in range(cases):
        rows = int(rng.choice([rng.integers(1, 17), rng.integers(1, 131), rng.integers(1, 513)]))
        width, out, seed = int(rng.integers(1, 401)), int(rng.integers(1, 151)), int(rng.integers(2**31))
        threads = int(rng.integers(1, 4))
        weight = quantize(make(out, width, seed, torch.bfloat16), FORMATS[rng.integers(len(FORMATS))])
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(out, generator=generator)
        x = torch.randn(rows, width, generator=generator).to(torch.bfloat16)
        cut = int(rng.integers(rows + 1))
        first = None
        for path in paths:
            linear = NativeLinear(pool(threads, path), weight, bias)
            whole = linear(x, wide=True)
            first = whole if first is None else first
            assert torch.equal(whole, first), (path, rows, width, out, weight.format)
            parts = [linear(part, wide=True) for part in (x[:cut], x[cut:]) if len(part)]
            assert torch.equal(torch.cat(parts), whole), (path, rows, cut, width, out, weight.format)
            compared += 1
    record(cases=cases, paths=compared / cases)


@pytest.mark.each_value
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize("path", Path)
def test_inputs_in_another_order_are_taken_in_it(pool, path: Path, format: WeightFormat) -> None:
    for width, rows, dtype in ((300, 7, torch.bfloat16), (64, 1, torch.bfloat16), (130, 97, torch.float32)):
        rounded = quantize(make(70, width, width, torch.bfloat16), format)
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
        ordered = NativeLinear(pool(2, path), replace(rounded, order=order), dtype=dtype)
        in_order = NativeLinear(pool(2, path), rounded, dtype=dtype)
        assert torch.equal(ordered(x, wide=True), in_order(x[:, order].contiguous(), wide=True))
        assert torch.equal(replace(rounded, order=order).floats()[:, order], rounded.floats())


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_rounding_is_to_the_nearest_number_of_the_format(format: WeightFormat) -> None:
    weight = make(50, 200, 1, torch.float32)
    rounded = quantize(weight, format)
    floats = rounded.floats()
    step = rounded.scales.repeat_interleave(format.group or 200, 1)[:, :200]
    error = (floats - weight).abs() / torch.where(step > 0, step, 1.0)
    # If the range is smaller by a tenth, the error at its ends is at most that tenth and half a step.
    assert bool((error <= (0.5001 if format.symmetric else 0.51 + (2**format.bits - 1) * 0.12)).all())
    assert error.mean() < 0.3
    assert bool((floats[0] == 0).all())
    assert torch.equal(rounded.scales, rounded.scales.bfloat16().float())
    if format.symmetric:
        assert torch.equal(quantize(floats, format).floats(), floats)


@pytest.mark.parametrize(("group", "most"), [(32, 1.02), (64, 0.97), (128, 0.93)])
def test_whole_zero_points_lose_little_against_any_offset(group: int, most: float) -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    grouped = weight.view(-1, group)
    low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
    step = (high - low) / 15
    with_offset = (((grouped - low) / step).round() * step + low - grouped).square().mean()
    floats = quantize(weight, WeightFormat(4, group, symmetric=False)).floats()
    assert (floats - weight).square().mean() < most * with_offset


@pytest.mark.parametrize("path", Path)
def test_the_largest_sums_of_the_longest_group_fit_32_bits(pool, path: Path) -> None:
    numbers = torch.full((16, MAX_INPUTS), 255, dtype=torch.uint8)
    numbers[1] = 0
    scales = torch.ones(16, 1)
    for zeros in (None, torch.zeros(16, 1, dtype=torch.uint8)):
        weight = QuantizedWeight(WeightFormat(8, None, symmetric=zeros is None), numbers, scales, zeros)
        for x in (torch.full((1, MAX_INPUTS), 2.0), torch.full((1, MAX_INPUTS), -2.0)):
            linear = NativeLinear(pool(1, path), weight, dtype=torch.float32)
            assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(weight, x)))


def with_minimums(bits: int, group: int, width: int) -> QuantizedWeight:
    """Return a random weight whose groups have any float as minimum."""
    generator = torch.Generator().manual_seed(bits + group)
    numbers = torch.randint(0, 1 << bits, (130, width), generator=generator, dtype=torch.uint8)
    scales, minimums = torch.randn(2, 130, -(-width // group), generator=generator)
    return QuantizedWeight(WeightFormat(bits, group, False), numbers, scales, minimums=minimums)


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [16, 32])
def test_minimums_may_be_any_float(pool, path: Path, bits: int, group: int) -> None:
    weight = with_minimums(bits, group, 320)
    x = torch.randn(9, 320, generator=torch.Generator().manual_seed(1))
    linear = NativeLinear(pool(2, path), weight, dtype=torch.float32)
    assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(weight, x)))
    assert (linear(x) / (x @ weight.floats().T) - 1).abs().median() < 0.01


@pytest.mark.parametrize(
    "source", [WeightFormat(4, 32, True), WeightFormat(8, 32, True), WeightFormat(4, 64, False)]
)
def test_a_widened_weight_has_the_same_numbers(source: WeightFormat) -> None:
    plain = quantize(make(50, 256, 3, torch.float32), source)
    weight = plain if source.symmetric else with_minimums(4, 64, 256)
    target = common_format([source, WeightFormat(8, 16, source.symmetric)])
    assert target == WeightFormat(8, 16, source.symmetric)
    widened = widen(weight, target)
    assert widened.format == target
    assert torch.equal(widened.floats(), weight.floats())
    with_offsets = widen(weight, WeightFormat(8, 16, False))
    assert torch.allclose(with_offsets.floats(), weight.floats(), rtol=1e-6, atol=1e-6)


def test_a_value_that_is_not_finite_stays_visible(pool) -> None:
    linear = NativeLinear(pool(1), quantize(make(64, 128, 2, torch.bfloat16), WeightFormat(8, 128, True)))
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    x[0, 5], x[1, 9] = torch.nan, torch.inf
    y = linear(x, wide=True)
    assert bool(y[0, 1:].isnan().all())
    assert not bool(y[1, 1:].isfinite().any())
    assert bool(y[2].isfinite().all())


def test_formats_by_name() -> None:
    assert parse_format("none") is None
    assert parse_format("int8") == WeightFormat(8, 128, symmetric=True)
    assert parse_format("w8a8") == WeightFormat(8, None, symmetric=True)
    assert parse_format(str(parse_format("w8a8"))) == parse_format("w8a8")
    assert parse_format("int4:32") == WeightFormat(4, 32, symmetric=False)
    for wrong in ("int4:48", "int3", "int8:", "int4:-32", "fp8"):
        with pytest.raises(ValueError, match="int4:GROUP"):
            parse_format(wrong)


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if kernels() is None:
        pytest.skip("no kernels on this machine")
