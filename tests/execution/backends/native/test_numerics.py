"""Every path of a numerics class computes the same bits: products, norms, attention and whole models."""

from collections.abc import Callable
from functools import partial
from pathlib import Path as Folder

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree
from streamserve.execution.backends.native.library import Path, ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.model import NativeModel
from streamserve.execution.backends.native.paths import numerics_of
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.formats.quantization import HEAD_FORMAT, parse_format
from streamserve.execution.loading.load import make_attention
from streamserve.execution.loading.weights import LinearMakers, load_model
from tests.conftest import Scale
from tests.execution.backends.native.forwarding import BLOCKS, forward
from tests.execution.backends.native.sequences import Sequence
from tests.execution.variants import TEXT, VARIANTS
from tests.processor import leave_out

DTYPES = [torch.bfloat16, torch.float32]
USUAL = ("llama", "gemma2", "qwen3_moe", "gpt_oss")
"""Architectures that together use all operations; their first variants also run without --full."""

Pools = Callable[[torch.dtype], list[ThreadPool]]


@pytest.fixture(scope="session")
def alike(pool: Callable[..., ThreadPool]) -> Pools:
    """Thread pools of two threads, one for each of this processor's paths in a numerics class that has
    several."""

    def make(dtype: torch.dtype) -> list[ThreadPool]:
        paths = [path for path in Path if pool().supports(path, dtype) and numerics_of(path) == "native"]
        if len(paths) < 2:  # Other tests compare each path with the formula.
            leave_out("two paths with the same bits")
        return [pool(2, path, dtype) for path in paths]

    return make


def assert_equal(results: list[torch.Tensor]) -> None:
    assert results[0].isfinite().all()
    assert results[0].any()
    for result in results[1:]:
        assert torch.equal(result, results[0])


@given(
    rows=st.integers(1, 130), width=st.integers(1, 400), out=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES), exponent=st.sampled_from([0, -30, -60]), cap=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_products(alike, rows, width, out, dtype, exponent, cap, seed) -> None:
    """Paths of a class give the same products, down to products too small for float32, which are zero."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(count, width, generator=generator).to(dtype) for count in (out, rows))
    weight *= 2.0**exponent
    x *= torch.where(torch.rand(rows, width, generator=generator) < 0.5, 2.0**exponent, 1.0)
    results = [NativeLinear(pool, weight)(x, wide=True, cap=cap) for pool in alike(dtype)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_products_too_small_for_float32_are_zero(alike) -> None:
    """Products too small for float32 are zero, because the bf16 dot product has no subnormal numbers."""
    weight = torch.full((64, 64), 2.0**-70).to(torch.bfloat16)
    x = torch.full((3, 64), 2.0**-60).to(torch.bfloat16)
    for pool in alike(torch.bfloat16):
        assert not NativeLinear(pool, weight)(x, wide=True).any()
        assert NativeLinear(pool, weight)(x * 64, wide=True).all()


def test_attention(alike, scale: Scale, record) -> None:
    """Paths of a class give the same attention for random lengths, heads, windows, chunks, sinks and trees;
    each case compares every row."""
    rng = np.random.default_rng(scale.seed)
    cases = scale.pick(8, 200)
    for _ in range(cases):
        dtype = DTYPES[int(rng.random() < 0.25)]
        length = int(rng.integers(2, 700))
        shape = {
            "dim": int(rng.choice([8, 24, 64])),
            "kv_heads": int(rng.integers(1, 3)),
            "group": int(rng.integers(1, 18)),
            "block_size": int(rng.choice([5, 16])),
            "window": [None, 100, 7][rng.integers(3)],
            "quantized": bool(rng.integers(2)),
            "sinks": bool(rng.integers(2)),
        }
        cut = int(rng.integers(1, length))
        parents = [-1, *(int(rng.integers(node)) for node in range(1, 9))]
        tree = TokenTree((0,) * 9, tuple(parents), (0.0,) * 9, (1.0,) * 9)
        results = []
        for pool in alike(dtype):
            sequence = Sequence(pool, length, dtype, **shape)
            whole = sequence.whole([cut, length - cut])
            branches = sequence.run(sequence.span(length, 1, tree), [node % length for node in range(9)])
            results.append(torch.cat([whole, branches]))
        assert_equal(results)
    record(cases=cases)


def model_of(folder: Folder, pool: ThreadPool, width: str, dtype: torch.dtype) -> NativeModel:
    spec, checkpoint = open_checkpoint(folder)
    spec, format = spec.at_length(TEXT.shape[1]), parse_format(width)
    linear = partial(NativeLinear, pool, dtype=dtype)
    makers = LinearMakers(linear, partial(linear, paired=True), linear, partial(NativeLinear, pool))
    head = HEAD_FORMAT if format else None
    return NativeModel.of(load_model(checkpoint, spec, dtype, makers, format=format, head=head), pool)


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain KV", "int8 KV"])
def test_models(alike, shared_checkpoint, scale: Scale, architecture, overrides, quantized) -> None:
    """Paths of a class give the same logits and stored keys and values, for weights of every width."""
    first = next(own for name, own in VARIANTS if name == architecture)
    if not scale.full and (architecture not in USUAL or overrides != first):
        pytest.skip("with --full")
    for dtype in DTYPES if scale.full else DTYPES[:1]:
        folder = shared_checkpoint(architecture, str(dtype).removeprefix("torch."), **overrides)
        for width in ("none", "int8", "int4:32") if scale.full else ("none", "int4:32"):
            logits, stored = [], []
            for pool in alike(dtype):
                model = model_of(folder, pool, width, dtype)
                cache = KVCache(model.spec, 16, 4, dtype, quantized=quantized)
                cache.data.zero_()
                attention = make_attention(cache, model.spec, pool)
                spans = [
                    Span(0, 0, TEXT[0, :47].tolist(), BLOCKS),
                    Span(0, 47, TEXT[0, 47:].tolist(), BLOCKS),
                ]
                logits.append(torch.cat([forward(model, attention, [span]) for span in spans]))
                stored.append(cache.data.view(torch.int8).clone())
            assert_equal(logits)
            assert all(torch.equal(each, stored[0]) for each in stored)
