"""Products with quantized weights, and products of experts, use the values that the stored numbers represent;
kernels multiply as plain torch does."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamserve.execution.backends.cuda.kernels import expand
from streamserve.execution.backends.cuda.linear import QuantizedLinear, TorchLinear
from streamserve.execution.backends.cuda.operations import operations
from streamserve.execution.backends.cuda.packing import Kind, PackedWeight, pack, packs, stack, unpack
from streamserve.execution.backends.cuda.plain import matrix as plain
from streamserve.execution.backends.cuda.routing import route, tile_of
from streamserve.execution.formats.quantization import QuantizedWeight, WeightFormat, quantize

CPU = torch.device("cpu")
FORMATS = {
    "int8": WeightFormat(8, 128, symmetric=True),
    "int8:32": WeightFormat(8, 32, symmetric=True),
    "int8:channel": WeightFormat(8, None, symmetric=True),
    "int8:16, minimums": WeightFormat(8, 16, symmetric=False, precise=True),
    "int8, zero points": WeightFormat(8, 64, symmetric=False),
    "int4": WeightFormat(4, 64, symmetric=False),
    "int4:32": WeightFormat(4, 32, symmetric=False),
    "int4:128, symmetric": WeightFormat(4, 128, symmetric=True),
    "int4:48, zero points": WeightFormat(4, 48, symmetric=False),
    "int4:16, minimums": WeightFormat(4, 16, symmetric=False, precise=True),
    "fp8": WeightFormat(8, None, symmetric=True, floating=True),
    "fp8:128": WeightFormat(8, 128, symmetric=True, floating=True),
    "mxfp4": WeightFormat(4, 32, symmetric=True, table="mxfp4"),
    "iq4": WeightFormat(4, 32, symmetric=True, precise=True, table="iq4"),
}


@dataclass(frozen=True)
class Product:
    rows: int
    outputs: int
    inputs: int
    biased: bool
    ordered: bool
    wide: bool
    dtype: torch.dtype
    seed: int

    def normal(self, number: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + number))


# Triton's interpreter truncates to bfloat16, where a GPU rounds to the nearest.
dtypes = st.sampled_from([torch.float32, torch.bfloat16][: 1 + torch.cuda.is_available()])
products = st.builds(
    Product, st.sampled_from([1, 2, 5, 17, 40]), st.integers(1, 50), st.sampled_from([16, 64, 96, 200]),
    st.booleans(), st.booleans(), st.booleans(), dtypes, st.integers(0, 2**31),
)  # fmt: skip


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 2e-5}[found.dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def random_weight(case: Product, format: WeightFormat) -> QuantizedWeight:
    """Return a weight that contains every number of its format."""
    groups = format.groups(case.inputs)
    generator = torch.Generator().manual_seed(case.seed)
    numbers = torch.randint(1 << format.bits, (case.outputs, case.inputs), generator=generator)
    numbers = numbers.to(torch.uint8)
    if format.floating:
        numbers[(numbers & 0x7F) == 0x7F] = 0x7E  # not a number
    scales = (case.normal(1, case.outputs, groups).abs() + 0.1) / format.largest
    if format.table == "mxfp4":
        scales = torch.exp2(scales.log2().round())
    zeros = minimums = None
    if not format.symmetric and format.precise:
        minimums = case.normal(2, case.outputs, groups)
    elif not format.symmetric:
        zeros = torch.randint(1 << format.bits, scales.shape, generator=generator).to(torch.uint8)
        scales = scales.bfloat16().float()
    order = torch.randperm(case.inputs, generator=generator) if case.ordered else None
    return QuantizedWeight(format, numbers, scales, zeros, minimums, order)


@pytest.mark.parametrize("format", FORMATS)
@given(case=products)
def test_packed_weights_stand_for_the_same_numbers(format: str, case: Product) -> None:
    weight = random_weight(case, FORMATS[format])
    packed = pack(weight, CPU)
    assert torch.equal(unpack(packed), weight.floats())
    bits = FORMATS[format].bits
    assert packed.numbers.nbytes <= case.outputs * (case.inputs + 1024 // bits - 1) * bits // 8


@given(case=products, format=st.sampled_from(list(FORMATS)))
@example("mxfp4", Product(3, 20, 200, True, True, False, torch.float32, 1))
@example("iq4", Product(3, 20, 200, True, False, False, torch.float32, 1))
@example("fp8", Product(17, 20, 200, False, True, False, torch.float32, 1))
@example("int4:16, minimums", Product(3, 20, 200, False, True, True, torch.float32, 1))
def test_products_with_quantized_weights(device, format: str, case: Product) -> None:
    weight = random_weight(case, FORMATS[format])
    x = case.normal(3, case.rows, case.inputs).to(case.dtype)
    bias = case.normal(4, case.outputs).to(case.dtype) if case.biased else None
    expected = x.double() @ weight.floats().double().T + (0 if bias is None else bias.double())
    for implementation, place in (("plain", CPU), ("kernels", device)):
        matrix = operations(implementation).matrix
        own = bias if bias is None else bias.to(place)
        linear = QuantizedLinear(matrix, place, weight, own, case.wide)
        found = linear(x.to(place))
        assert found.dtype == (torch.float32 if case.wide else case.dtype)
        close(found / 10, expected.to(found.dtype) / 10)


def test_rounded_weights_are_those_of_the_format(device) -> None:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    for name in ("int8", "int4", "fp8"):
        packed = pack(quantize(weight, FORMATS[name]), device)
        largest = (unpack(packed).cpu() - weight).abs().max()
        assert 0 < largest < {"int8": 0.02, "int4": 0.6, "fp8": 0.15}[name]
        assert packed.scales is not None
        assert packed.scales.dtype == (torch.float32 if name == "fp8" else torch.bfloat16)


def test_long_inputs_are_divided_among_programs(device) -> None:
    matrix = operations("kernels").matrix
    case = Product(3, 40, 2100, True, False, False, torch.float32, 5)
    weight, x = random_weight(case, FORMATS["int4"]), case.normal(3, 3, 2100)
    packed = pack(weight, device)
    assert matrix.choose_splits(1, packed) == 2
    bias = case.normal(4, 40)
    found = matrix.multiply(x.to(device), packed, bias.to(device), torch.float32)
    expected = x.double() @ weight.floats().double().T + bias.double()
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-4, atol=1e-4)


@settings(max_examples=4 if settings.default.max_examples < 200 else 200)  # the interpreter is slow
@given(
    rows=st.integers(1, 5), outputs=st.integers(1, 40), inputs=st.sampled_from([2048, 2100]),
    format=st.sampled_from(["int8:32", "int4", "fp8:128", "mxfp4"]), biased=st.booleans(), dtype=dtypes,
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_parts_of_long_inputs_are_added_up(device, rows, outputs, inputs, format, biased, dtype, seed):
    case = Product(rows, outputs, inputs, biased, False, False, dtype, seed)
    weight, x = random_weight(case, FORMATS[format]), case.normal(3, rows, inputs).to(dtype)
    packed, matrix = pack(weight, device), operations("kernels").matrix
    assert matrix.choose_splits(1, packed) > 1
    bias = case.normal(4, outputs).to(dtype) if biased else None
    found = matrix.multiply(x.to(device), packed, bias if bias is None else bias.to(device), dtype)
    expected = x.double() @ weight.floats().double().T + (0 if bias is None else bias.double())
    close(found / 30, expected.to(dtype) / 30)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs", "wide"), [(5, 64, True), (19, 200, False)])
def test_products_of_many_rows_write_the_weights_as_floats(
    device, monkeypatch, format: str, outputs: int, inputs: int, wide: bool
) -> None:
    monkeypatch.setattr(expand, "scratch_of", lambda place: torch.empty(4 * 7 * inputs, device=place))
    case = Product(3, outputs, inputs, True, False, wide, torch.float32, 3)
    weight, x, bias = random_weight(case, FORMATS[format]), case.normal(3, 3, inputs), case.normal(4, outputs)
    own = pack(weight, device)
    found = expand.multiply_expanded(x.to(device), own, bias.to(device), torch.float32)
    expected = x.double() @ weight.floats().double().T + bias.double()
    close(found / 10, expected.float() / 10)


def test_groups_of_few_inputs_cannot_be_packed() -> None:
    assert not packs(WeightFormat(4, 8, symmetric=True))
    assert not packs(WeightFormat(8, 24, symmetric=True))
    case = Product(1, 8, 48, False, False, False, torch.float32, 0)
    with pytest.raises(ValueError, match="groups of 24 inputs"):
        pack(random_weight(case, WeightFormat(8, 24, symmetric=True)), CPU)


@given(
    rows=st.integers(1, 70), experts=st.sampled_from([1, 2, 5, 12]), each=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_every_pair_is_in_one_tile_of_its_expert(rows: int, experts: int, each: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    each = min(each, experts)
    chosen = torch.rand(rows, experts, generator=generator).argsort(1)[:, :each]
    if seed % 3 == 0:
        chosen = chosen[:1].repeat(rows, 1)
    routing = route(chosen, experts)
    found: list[int] = []
    for expert, first, count in zip(*(one.tolist() for one in routing[1:]), strict=True):
        pairs = routing.order[first : first + count].tolist()
        assert all(int(chosen.flatten()[pair]) == expert for pair in pairs)
        assert count <= tile_of(rows * each, experts)
        found += pairs
    assert sorted(found) == list(range(rows * each))


@example(format="int8", rows=50, experts=2, each=1, biased=True, shared=True, dtype=torch.float32, seed=0)
@given(
    format=st.sampled_from(["floats", "int8", "int4", "mxfp4", "int4:16, minimums"]),
    rows=st.sampled_from([1, 3, 20, 40]), experts=st.sampled_from([1, 2, 5]), each=st.integers(1, 2),
    biased=st.booleans(), shared=st.booleans(), dtype=dtypes, seed=st.integers(0, 2**31),
)  # fmt: skip
def test_experts(device, format: str, rows, experts, each, biased, shared, dtype, seed) -> None:
    case, each = Product(rows, 24, 64, biased, False, False, dtype, seed), min(each, experts)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, experts, generator=generator).argsort(1)[:, :each]
    x = case.normal(3, rows, 64).to(dtype)
    weights = []
    for number in range(experts):
        one = Product(rows, 24, 64, biased, False, False, dtype, seed + 7 * number)
        floats = TorchLinear(case.normal(9 + number, 24, 64).to(dtype))
        weights.append(
            floats.packed if format == "floats" else pack(random_weight(one, FORMATS[format]), CPU)
        )
    stacked = stack(weights)
    bias = case.normal(5, experts, 24).to(dtype) if biased else None
    shares = torch.rand(rows, each + shared, generator=generator)
    further = case.normal(6, rows, 24).to(dtype) if shared else None
    total = torch.zeros(rows, 24)
    for row in range(rows):
        for rank, expert in enumerate(chosen[row].tolist()):
            y = x[row].float() @ unpack(weights[expert]).T
            y = y if bias is None else y + bias[expert].float()
            total[row] += shares[row, rank] * y.to(dtype).float()
        if further is not None:
            total[row] += shares[row, each] * further[row].float()
    for matrix, place in ((plain, CPU), (operations("kernels").matrix, device)):
        routing = route(chosen.to(place), experts)
        own = None if bias is None else bias.to(place)
        outputs = matrix.multiply_routed(x.to(place), moved(stacked, place), own, routing, each)
        found = matrix.combine_experts(
            outputs, shares.to(place), None if further is None else further.to(place)
        )
        close(found / 10, total.to(dtype) / 10)


def moved(weight: PackedWeight, device: torch.device) -> PackedWeight:
    fields = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
    return PackedWeight(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in fields.items()})


def test_experts_of_different_formats_cannot_be_stacked() -> None:
    case = Product(1, 8, 64, False, False, False, torch.float32, 0)
    one, other = (pack(random_weight(case, FORMATS[name]), CPU) for name in ("int8", "int4"))
    with pytest.raises(ValueError, match="different formats"):
        stack([one, other])
    ordered = Product(1, 8, 64, False, True, False, torch.float32, 0)
    with pytest.raises(ValueError, match="order"):
        stack([pack(random_weight(ordered, FORMATS["int4"]), CPU)])


def test_scales_of_experts_have_one_type() -> None:
    case = Product(1, 8, 64, False, False, False, torch.float32, 0)
    weights = [random_weight(case, FORMATS["int8:32"]) for _ in range(2)]
    short = QuantizedWeight(weights[1].format, weights[1].numbers, weights[1].scales.bfloat16().float())
    packed = [pack(weights[0], CPU), pack(short, CPU)]
    assert [one.scales.dtype for one in packed if one.scales is not None] == [torch.float32, torch.bfloat16]
    joined = stack(packed)
    assert torch.equal(unpack(joined), torch.stack([weights[0].floats(), short.floats()]))
    assert joined.kind == Kind.INTEGERS
