"""For the operations between matrix products, kernels and plain torch compute and round in the same way."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.cuda.operations import operations
from streamserve.execution.backends.cuda.plain import layers as plain
from streamserve.execution.compute.kv_vectors import SCALE_BYTES, dequantize_vectors
from streamserve.execution.model.rope import rotate
from streamserve.execution.model.spec import Clamp


@pytest.fixture(scope="module")
def kernels():
    return operations("kernels").layers


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare two results that were rounded separately: the last bits of the dtype may differ."""
    tolerance = {torch.bfloat16: 2**-6, torch.float32: 3e-6}[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)


# Triton's interpreter truncates to bfloat16, where a GPU rounds to the nearest.
dtypes = st.sampled_from([torch.float32, torch.bfloat16][: 1 + torch.cuda.is_available()])
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Norms:
    rows: int
    n: int
    dtype: torch.dtype
    wide: bool
    add: bool
    post: bool
    multiplier: float
    normed: bool
    into: bool
    seed: int


norms = st.builds(
    Norms, st.integers(1, 5), st.integers(1, 130), dtypes, st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([1.0, 0.3]), st.booleans(), st.booleans(), seeds,
)  # fmt: skip


@given(case=norms)
def test_add_rms_norm(kernels, device, case):
    hidden = normal(case.seed, case.rows, case.n, dtype=case.dtype)
    delta = normal(case.seed + 1, case.rows, case.n, dtype=case.dtype) if case.add else None
    wide = torch.float32 if case.wide else case.dtype
    weight = normal(case.seed + 2, case.n, dtype=wide) if case.normed else None
    post = normal(case.seed + 3, case.n, dtype=wide) if case.post else None
    results = []
    for module, place in ((plain, torch.device("cpu")), (kernels, device)):
        mine = hidden.to(place, copy=True)
        out = torch.full_like(mine, torch.nan) if case.into else None
        added, weights, posts = (x if x is None else x.to(place) for x in (delta, weight, post))
        found = module.add_rms_norm(mine, added, weights, 1e-5, out, posts, case.multiplier)
        assert out is None or found is out
        results.append((found, mine))
    (expected, expected_sum), (found, found_sum) = results
    close(found, expected)
    close(found_sum, expected_sum)
    if not case.post:
        assert torch.equal(found_sum.cpu(), expected_sum)  # the sum is exact


@given(rows=st.integers(1, 4), heads=st.integers(1, 5), kv_heads=st.integers(1, 3), dtype=dtypes, seed=seeds)
def test_queries_and_keys_are_normed_jointly(kernels, device, rows, heads, kv_heads, dtype, seed):
    qkv = normal(seed, rows, (heads + 2 * kv_heads) * 6, dtype=dtype)
    weight = normal(seed + 1, heads + kv_heads, 6)
    expected, found = qkv.clone(), qkv.to(device, copy=True)
    plain.norm_jointly(expected, weight, 1e-5, heads)
    kernels.norm_jointly(found, weight.to(device), 1e-5, heads)
    close(found, expected)
    first = expected[:, : heads * 6].float() / weight.flatten()[: heads * 6]
    assert ((first**2).mean(1) - 1).abs().max() < (1e-2 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("kind", ["silu", "gelu_pytorch_tanh", "clamped"])
@given(rows=st.integers(1, 5), n=st.integers(1, 1500), dtype=dtypes, seed=seeds)
def test_gates(kernels, device, kind, rows, n, dtype, seed):
    gate_up = 3 * normal(seed, rows, 2 * n, dtype=dtype)
    options = ("silu", Clamp(1.7, 2.5)) if kind == "clamped" else (kind,)
    close(kernels.gate(gate_up.to(device), *options), plain.gate(gate_up, *options))


@dataclass(frozen=True)
class Rotation:
    rows: int
    heads: int
    kv_heads: int
    dim: int
    turned: float
    block_size: int
    dtype: torch.dtype
    seed: int


rotations = st.builds(
    Rotation,
    st.integers(1, 6), st.integers(1, 7), st.integers(1, 3), st.sampled_from([4, 12, 16, 64]),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from([1, 3, 16]), dtypes, seeds,
)  # fmt: skip


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@given(case=rotations)
def test_rotation_and_storing_of_keys_and_values(kernels, device, normed, quantized, case):
    heads, dim, turned = case.heads + 2 * case.kv_heads, case.dim, int(case.dim * case.turned) // 2 * 2
    qkv = normal(case.seed, case.rows, heads * dim, dtype=case.dtype)
    norm = normal(case.seed + 1, case.heads + case.kv_heads, dim, dtype=case.dtype) if normed else None
    angles = normal(case.seed + 2, 50, turned // 2)
    turns = (angles.cos().to(case.dtype), angles.sin().to(case.dtype)) if turned else (None, None)
    generator = torch.Generator().manual_seed(case.seed)
    positions = torch.randint(50, (case.rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(8 * case.block_size, generator=generator)[: case.rows].int()
    stored, width = (torch.int8, dim + SCALE_BYTES) if quantized else (case.dtype, dim)
    results = []
    for module, place in ((plain, torch.device("cpu")), (kernels, device)):
        cache = torch.zeros(8, 2, case.kv_heads, case.block_size, width, dtype=stored, device=place)
        mine = qkv.to(place, copy=True)
        module.rotate_and_store(
            mine, norm if norm is None else norm.to(place), 1e-6,
            *(turn if turn is None else turn.to(place) for turn in turns), positions.to(place), cache,
            slots.to(place), case.heads, case.kv_heads,
        )  # fmt: skip
        results.append((mine.view(case.rows, heads, dim)[:, : case.heads].cpu(), cache.cpu()))
    (queries, cache), (found_queries, found_cache) = results
    if not normed:
        assert torch.equal(found_queries, queries)
        assert torch.equal(found_cache, cache)
        return
    close(found_queries, queries)
    if quantized:  # Different last bits of a norm may become a different integer.
        assert (found_cache[..., :dim].int() - cache[..., :dim].int()).abs().max() <= 1
        floats = [dequantize_vectors(one, torch.float32) for one in (found_cache, cache)]
        torch.testing.assert_close(*floats, rtol=0, atol=float(floats[1].abs().max()) / 100)
    else:
        close(found_cache, cache)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, 1e-44])
def test_odd_numbers_are_quantized_as_on_the_cpu(kernels, device, value):
    qkv = normal(0, 2, 3 * 16)
    qkv[1, 20] = qkv[0, 40] = value
    if abs(value) < 1:
        qkv[1, 16:32] = value
    caches = []
    for module, place in ((plain, torch.device("cpu")), (kernels, device)):
        cache = torch.zeros(1, 2, 1, 2, 20, dtype=torch.int8, device=place)
        slots = torch.tensor([0, 1], dtype=torch.int32, device=place)
        module.rotate_and_store(qkv.to(place), None, 0.0, None, None, slots, cache, slots, 1, 1)
        caches.append(cache.cpu())
    assert torch.equal(caches[0], caches[1])


def test_plain_rotation_is_the_models():
    qkv = normal(0, 3, 4 * 8)
    angles = normal(1, 20, 4)
    positions = torch.tensor([4, 0, 19], dtype=torch.int32)
    cache = torch.zeros(5, 2, 1, 4, 8)
    mine = qkv.clone()
    plain.rotate_and_store(mine, None, 0.0, angles.cos(), angles.sin(), positions, cache, positions[:], 2, 1)
    split = qkv.view(3, 4, 8)
    turned = rotate(split[:, :3], angles.cos()[positions], angles.sin()[positions])
    assert torch.equal(mine.view(3, 4, 8)[:, :2], turned[:, :2])
    assert torch.equal(cache[1, 0, 0, 0], turned[0, 2])
    assert torch.equal(cache[0, 1, 0, 0], split[1, 3])


@given(rows=st.integers(1, 300), seed=seeds)
def test_tokens_of_the_step_before_are_fed(kernels, device, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, (rows,), generator=generator, dtype=torch.int32)
    results = torch.randint(1000, (50,), generator=generator, dtype=torch.int32)
    sources = torch.randint(-1, 50, (rows,), generator=generator, dtype=torch.int32)
    expected = [
        int(results[source]) if source >= 0 else int(token)
        for token, source in zip(tokens, sources, strict=True)
    ]
    for module, place in ((plain, torch.device("cpu")), (kernels, device)):
        found = module.gather_tokens(tokens.to(place), results.to(place), sources.to(place))
        assert found.tolist() == expected


@pytest.mark.parametrize("multiplier", [1.0, 5.5])
@given(rows=st.integers(1, 5), hidden=st.integers(1, 2100), dtype=dtypes, seed=seeds)
def test_embedding(kernels, device, multiplier, rows, hidden, dtype, seed):
    table = normal(seed, 7, hidden, dtype=dtype)
    tokens = torch.randint(7, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    expected = table[tokens] * multiplier
    assert torch.equal(kernels.embed(table.to(device), tokens.to(device), multiplier).cpu(), expected)
    assert torch.equal(plain.embed(table, tokens, multiplier), expected)
