"""The operations between matrix products: kernels and plain torch compute the same, rounded alike."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.cuda.operations import operations
from streamserve.execution.cuda.plain import layers as plain
from streamserve.execution.rope import rotate


@pytest.fixture(scope="module")
def kernels():
    return operations("kernels").layers


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow the last bits of the dtype: results of two roundings."""
    tolerance = {torch.bfloat16: 2**-6, torch.float32: 3e-6}[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)


# Triton's interpreter truncates to bfloat16, where a GPU rounds to the nearest.
dtypes = st.sampled_from([torch.float32, torch.bfloat16][: 1 + torch.cuda.is_available()])
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(rows=st.integers(1, 5), n=st.integers(1, 130), dtype=dtypes, seed=seeds, add=st.booleans())
def test_add_rms_norm(kernels, device, rows, n, dtype, seed, add):
    hidden = normal(seed, rows, n, dtype=dtype)
    delta = normal(seed + 1, rows, n, dtype=dtype) if add else None
    weight = normal(seed + 2, n, dtype=dtype)
    on_device = hidden.to(device, copy=True)
    found = kernels.add_rms_norm(
        on_device, delta if delta is None else delta.to(device), weight.to(device), 1e-5
    )
    close(found, plain.add_rms_norm(hidden, delta, weight, 1e-5))
    assert torch.equal(on_device.cpu(), hidden)  # the sum is exact


@given(rows=st.integers(1, 5), n=st.integers(1, 1500), dtype=dtypes, seed=seeds)
def test_swiglu(kernels, device, rows, n, dtype, seed):
    gate_up = normal(seed, rows, 2 * n, dtype=dtype)
    close(kernels.swiglu(gate_up.to(device)), plain.swiglu(gate_up))


@dataclass(frozen=True)
class Rotation:
    rows: int
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    dtype: torch.dtype
    seed: int


rotations = st.builds(
    Rotation,
    st.integers(1, 6), st.integers(1, 7), st.integers(1, 3), st.sampled_from([2, 6, 16, 64]),
    st.sampled_from([1, 3, 16]), dtypes, seeds,
)  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
@given(case=rotations)
def test_rotation_and_storing_of_keys_and_values(kernels, device, normed, case):
    heads = case.heads + 2 * case.kv_heads
    qkv = normal(case.seed, case.rows, heads * case.dim, dtype=case.dtype)
    norm = normal(case.seed + 1, case.heads + case.kv_heads, case.dim, dtype=case.dtype) if normed else None
    angles = normal(case.seed + 2, 50, case.dim // 2)
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    positions = torch.randint(50, (case.rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(8 * case.block_size, generator=generator)[: case.rows].int()
    results = []
    for module, place in ((plain, torch.device("cpu")), (kernels, device)):
        cache = torch.zeros(8, 2, case.kv_heads, case.block_size, case.dim, dtype=case.dtype, device=place)
        mine = qkv.to(place, copy=True)
        module.rotate_and_store(
            mine, norm if norm is None else norm.to(place), 1e-6, cos.to(place), sin.to(place),
            positions.to(place), cache, slots.to(place), case.heads, case.kv_heads,
        )  # fmt: skip
        results.append((mine.view(case.rows, heads, case.dim)[:, : case.heads].cpu(), cache.cpu()))
    (queries, cache), (found_queries, found_cache) = results
    if normed:
        close(found_queries, queries)
        close(found_cache, cache)
    else:
        assert torch.equal(found_queries, queries)
        assert torch.equal(found_cache, cache)


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


@given(rows=st.integers(1, 5), hidden=st.integers(1, 2100), dtype=dtypes, seed=seeds)
def test_embedding(kernels, device, rows, hidden, dtype, seed):
    table = normal(seed, 7, hidden, dtype=dtype)
    tokens = torch.randint(7, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    assert torch.equal(kernels.embed(table.to(device), tokens.to(device)).cpu(), table[tokens])
    assert torch.equal(plain.embed(table, tokens), table[tokens])
