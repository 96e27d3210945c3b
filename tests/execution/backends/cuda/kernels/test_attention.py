"""The attention kernel gives the same result as the reference, for every kind of step and cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import root
from streamserve.execution.backends.cuda.kernels.attention import attend, combine
from streamserve.execution.backends.cuda.plain.attention import attend as plain_attend
from streamserve.execution.backends.reference.attention import ReferenceAttention
from streamserve.execution.compute.kv_vectors import quantize_vectors
from tests.conftest import Scale
from tests.execution.backends.cuda.attention_cases import Case, make_case, random_case, random_tree, run_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("8 bits", "sinks", "8 bits and sinks")


def mixed_case(dim: int = 16, block_size: int = 16, window: int = 9) -> Case:
    """Return a step with a chunk, a divided decode span and a tree: all tile sizes and partial results."""
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 7)
    spans = [
        Span(0, 5, [0] * 40, []),
        Span(1, 400, [0], [], root(0), (0,)),
        Span(2, 30, [0, 0], [], tree, (0,)),
    ]
    sizes = [-(-(span.start + span.query_tokens) // block_size) for span in spans]
    blocks = rng.permutation(sum(sizes))
    for span, table in zip(spans, np.split(blocks, np.cumsum(sizes)), strict=False):
        span.blocks.extend(table.tolist())
    case = make_case(spans, len(blocks), block_size, 2, 3, dim, window)
    work = case.plan().works[None]
    assert (np.diff(work.starts) > 0).all()
    assert work.combine[:, 2].max() > 1
    return case


@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_is_the_reference(seed: int, scale: Scale) -> None:
    for number in range(seed, scale.pick(seed + (1 if DEVICE == "cpu" else 7), 240), 6):
        case = random_case(1000 + number, dims=(16, 20, 32), largest=140 if number % 4 == 1 else 40)
        arrays = case.plan()
        layers: Sequence[int] = range(2) if DEVICE == "cuda" else (number // 2 % 2,)
        for layer in layers:
            out = run_layer(attend, case, arrays, layer, DEVICE)
            torch.testing.assert_close(out, case.expected[layer], rtol=1e-4, atol=2e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
@pytest.mark.parametrize("layer", [0, 1])
def test_all_tile_sizes_at_once(dim: int, layer: int, scale: Scale) -> None:
    if not scale.full and DEVICE == "cpu" and layer == (dim > 100):
        pytest.skip("with --full")
    case = mixed_case(dim)
    out = run_layer(attend, case, case.plan(), layer, DEVICE)
    torch.testing.assert_close(out, case.expected[layer], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_scores_are_capped(softcap: float) -> None:
    case = mixed_case()
    arrays = case.plan()
    expected = run_layer(plain_attend, case, arrays, 1, softcap=softcap)
    assert (expected - case.expected[1]).abs().max() > 1e-5
    out = run_layer(attend, case, arrays, 1, DEVICE, softcap=softcap)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_caches_are_scaled(cached: torch.dtype, dtype: torch.dtype) -> None:
    case = mixed_case()
    arrays = case.plan()
    scales = {"k_scale": 0.7, "v_scale": 1.5}
    cache_layer = case.cache.data[0].to(cached)
    q = case.q.to(dtype)
    expected = run_layer(plain_attend, case, arrays, 0, cache_layer=cache_layer, q=q, **scales)
    out = run_layer(attend, case, arrays, 0, DEVICE, cache_layer, q, **scales)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_8_bits_and_sinks(kind: str, seed: int, scale: Scale) -> None:
    if not scale.full and DEVICE == "cpu" and seed % 3 != KINDS.index(kind):
        pytest.skip("with --full")
    for number in range(seed, seed + scale.pick(1, 9)):
        case = random_case(3000 + number, dims=(16, 20, 32), largest=40)
        case = mixed_case(block_size=(3, 16)[seed // 4], window=7) if seed % 4 == 0 else case
        arrays, layer = case.plan(), number % 2
        options: dict[str, torch.Tensor] = {}
        cache_layer = case.cache.data[layer]
        if "8 bits" in kind:
            cache_layer = quantize_vectors(cache_layer)
        if "sinks" in kind:
            generator = torch.Generator().manual_seed(number)
            options["sinks"] = 3 * torch.randn(case.q.shape[1], generator=generator)
        expected = run_layer(plain_attend, case, arrays, layer, cache_layer=cache_layer, **options)
        assert (expected - case.expected[layer]).abs().max() > 1e-4
        on_device = {name: values.to(DEVICE) for name, values in options.items()}
        out = run_layer(attend, case, arrays, layer, DEVICE, cache_layer, **on_device)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dim", [64, 128])
def test_vectors_of_8_bits_that_are_not_aligned(dim: int) -> None:
    """Vectors of 132 bytes work: a device faults if they are copied as if they were aligned to 16 bytes."""
    case = mixed_case(dim)
    arrays, q = case.plan(), case.q.to(torch.bfloat16)
    cache_layer = quantize_vectors(case.cache.data[1])
    expected = run_layer(plain_attend, case, arrays, 1, cache_layer=cache_layer, q=q)
    out = run_layer(attend, case, arrays, 1, DEVICE, cache_layer, q)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_blocks_more_than_2_gigabytes_from_the_first() -> None:
    """Blocks more than 2 GB from the first are addressed correctly. The memory before them is reserved and
    not used."""
    case = mixed_case()
    arrays, blocks = case.plan(), quantize_vectors(case.cache.data[1])
    first = 2**31 // blocks[0].numel() + 1
    cache_layer = torch.empty(first + len(blocks), *blocks.shape[1:], dtype=blocks.dtype)
    cache_layer[first:] = blocks
    expected = run_layer(plain_attend, case, arrays, 1, cache_layer=blocks)
    arrays = replace(arrays, tables=arrays.tables + np.int32(first))
    out = run_layer(attend, case, arrays, 1, DEVICE, cache_layer)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 3, 7, 40]), min_size=1, max_size=6),
    heads=st.integers(1, 5), dim=st.sampled_from([4, 16, 20, 64]), sinks=st.booleans(),
    unseen=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_partial_results_are_combined(counts, heads, dim, sinks, unseen, dtype, seed) -> None:
    """Partial results are combined: rows without partial results stay unchanged, and parts in which a row saw
    no key have no weight."""
    if DEVICE == "cpu":
        dtype = torch.float32  # Triton's interpreter truncates to bfloat16
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    total = sum(counts)
    places = torch.zeros(len(counts), 3, dtype=torch.int32)
    order = torch.randperm(len(counts), generator=generator).tolist()
    first = 0
    for row in order:
        places[row] = torch.tensor([first, 1, counts[row]])
        first += counts[row]
    values, peaks, weights = (
        normal(total, heads, dim),
        9 * normal(total, heads),
        normal(total, heads).abs() + 0.1,
    )
    if unseen:
        for row, count in enumerate(counts):
            if count > 1:
                part = int(places[row, 0]) + count - 1
                peaks[part], weights[part], values[part] = -torch.inf, 0.0, 0.0
    extra = 3 * normal(heads) if sinks else None
    expected = torch.full((len(counts), heads, dim), 7.0)
    for row, count in enumerate(counts):
        if count:
            own = slice(int(places[row, 0]), int(places[row, 0]) + count)
            # Maxima are in units of log2; weights and values are relative to them.
            scale = torch.exp2(peaks[own].double())[..., None]
            sums = (weights[own].double()[..., None] * scale).sum(0)
            if extra is not None:
                sums = sums + extra.double().exp()[:, None]
            expected[row] = ((values[own].double() * scale).sum(0) / sums).float()
    out = torch.full((len(counts), heads, dim), 7.0, dtype=dtype, device=DEVICE)
    flat = [values.flatten(), torch.stack((peaks, weights), -1).flatten()]
    combine(
        places.to(DEVICE), *(x.to(DEVICE) if total else torch.zeros(1, device=DEVICE) for x in flat), out,
        extra if extra is None else extra.to(DEVICE),
    )  # fmt: skip
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.cpu().float(), expected, rtol=tolerance, atol=tolerance)


def test_plain_attention_with_sinks_is_the_references() -> None:
    case = mixed_case()
    sinks = torch.linspace(-2, 4, case.q.shape[1])
    reference = ReferenceAttention(case.cache, case.windows, case.group)
    reference.plan(case.layout)
    _, heads, dim = case.q.shape
    vectors = case.cache.data[1].permute(0, 3, 1, 2, 4).reshape(-1, 2, heads // case.group, dim)
    kv = vectors[case.layout.slots]
    expected = reference.run(1, case.q, kv[:, 0], kv[:, 1], sinks)
    out = run_layer(plain_attend, case, case.plan(), 1, sinks=sinks)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_slots_outside_of_the_items_are_not_read(layer: int) -> None:
    case = mixed_case(block_size=32, window=20)
    cache_layer = case.cache.data[layer].clone()
    unused = torch.ones(cache_layer.shape[0], 32, dtype=torch.bool)
    for part in case.layout.parts:
        slots = np.arange(part.span.start + part.span.query_tokens)
        if layer == 0:  # With the window, blocks that have left it may have been freed.
            slots = slots[slots > part.positions[part.span.start :].min() - case.windows[0]]
        unused[np.asarray(part.span.blocks)[slots // 32], slots % 32] = False
    cache_layer.permute(0, 3, 1, 2, 4)[unused] = torch.nan
    assert cache_layer.isnan().any()
    out = run_layer(attend, case, case.plan(), layer, DEVICE, cache_layer)
    torch.testing.assert_close(out, case.expected[layer], rtol=1e-4, atol=2e-5)


def test_tile_sizes_without_items_need_no_launch() -> None:
    case = make_case([Span(0, 20, [0], [1, 0], root(0), (0,))], 2, 16, 1, 2, 16, 9)
    out = run_layer(attend, case, case.plan(), 1, DEVICE, tiles=(True, False, False), combined=False)
    torch.testing.assert_close(out, case.expected[1], rtol=1e-4, atol=2e-5)


def test_heads_that_are_not_contiguous_are_refused() -> None:
    case = make_case([Span(0, 20, [0], [1, 0], root(0), (0,))], 2, 16, 1, 2, 16, 9)
    with pytest.raises(ValueError, match="contiguous"):
        run_layer(attend, case, case.plan(), 1, DEVICE, q=case.q.transpose(1, 2).contiguous().transpose(1, 2))
