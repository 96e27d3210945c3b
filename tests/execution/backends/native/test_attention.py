"""The kernels' attention is a dense masked softmax, and the bits of a row do not depend on other rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree
from streamserve.execution.backends.native.attention import NativeAttention
from streamserve.execution.backends.native.library import Path
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.kv_vectors import dequantize_vectors
from streamserve.execution.model.layout import lay_out
from tests.execution.backends.native.paths import EVERY_PATH
from tests.execution.backends.native.sequences import Sequence
from tests.execution.dense_attention import dense
from tests.execution.kv_reference import reference_bytes, reference_numbers
from tests.execution.kv_spec import SPEC
from tests.execution.strategies import steps

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@given(
    step=steps(),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 17]),
    dim=st.sampled_from([8, 24, 32, 64]),
    window=st.none() | st.integers(1, 20),
    threads=st.sampled_from([1, 2]),
    quantized=st.booleans(),
    sink=st.none() | st.floats(-4, 8),
)
def test_attention_is_a_dense_masked_softmax(
    pool, path, dtype, step, kv_heads, group, dim, window, threads, quantized, sink
):
    """Attention is a dense masked softmax over the keys and values as they are read from the cache, including
    the step's own."""
    heads = kv_heads * group
    spec = replace(SPEC, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    cache = KVCache(spec, step.num_blocks, step.block_size, dtype, quantized=quantized)
    shape = (*cache.data.shape[:-1], dim)
    written = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    cache.data.copy_(reference_bytes(written) if quantized else written)
    attention = NativeAttention(pool(threads, path, dtype), cache, [window], group)
    layout = lay_out(step.spans, step.block_size)
    attention.plan(layout)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(len(layout.tokens), heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    sinks = None if sink is None else sink + torch.randn(heads, generator=generator)
    out = attention.run(0, q, k, v, sinks)
    block, slot = np.divmod(layout.slots, step.block_size)
    written[0, block, 0, :, slot], written[0, block, 1, :, slot] = k, v
    assert torch.equal(cache.data, reference_bytes(written) if quantized else written)
    numbers = reference_numbers(written[0]) if quantized else written[0]
    bound = 1e-5 if dtype == torch.float32 else 2**-6
    for part in layout.parts:
        for row in range(part.span.query_tokens):
            expected = dense(part, row, q[part.offset + row], numbers, window, sinks)
            torch.testing.assert_close(out[part.offset + row].double(), expected, rtol=bound, atol=bound)


@pytest.mark.each_value
@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"window": 150},
        {"sinks": True},
        {"dim": 64, "group": 4},
        {"block_size": 5, "dim": 24},
        {"group": 20, "kv_heads": 1, "block_size": 32},
        {"quantized": True},
        {"quantized": True, "block_size": 5, "dim": 24, "window": 150},
        {"quantized": True, "dim": 64, "group": 4},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_chunks_or_threads(pool, path, dtype, shape):
    length = 620 if path >= Path.AVX2 else 560
    expected = Sequence(pool(1, path, dtype), length, dtype, **shape).whole([length])
    for threads, sizes in [
        (1, [1, 130, 7, *[1] * 3, 250, length - 391]),
        (2, [length]),
        (2, [300, 200, *[1] * (length - 500)]),
        (3, [511, 1, 1, length - 513]),
    ]:
        result = Sequence(pool(threads, path, dtype), length, dtype, **shape).whole(sizes)
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
def test_sinks_that_outweigh_all_keys_leave_nothing(pool, path, dtype):
    """Sinks that outweigh all keys leave no output, and sinks without weight change no bit; in one part, and
    in several parts that are merged."""
    for threads in (1, 2):
        sequence, results = Sequence(pool(threads, path, dtype), 600, dtype), []
        for weight in (None, -1e4, 1e4):
            sequence.sinks = None if weight is None else torch.full((6,), weight)
            results.append(sequence.whole([600]))
        assert torch.equal(results[1], results[0])
        assert not results[2].any()


def test_random_chunks_have_the_bits_of_the_whole(pool, scale, record):
    """Random chunks give the bits of the whole text. Lengths, heads, windows, chunks and thread pools are
    random; each case compares every row."""
    rng = np.random.default_rng(scale.seed)
    cases = scale.pick(12, 150)
    for _ in range(cases):
        dtype = DTYPES[rng.integers(2)]
        length = int(rng.integers(2, 700))
        shape = {
            "dim": int(rng.choice([24, 32, 64])),
            "kv_heads": int(rng.integers(1, 3)),
            "group": int(rng.integers(1, 6)),
            "block_size": int(rng.choice([5, 16])),
            "window": [None, 100][rng.integers(2)],
            "quantized": bool(rng.integers(2)),
        }
        sizes = np.sort(rng.choice(np.arange(1, length), size=min(length - 1, 5), replace=False))
        sizes = np.diff([0, *sizes, length]).tolist()
        whole = Sequence(pool(int(rng.integers(1, 4))), length, dtype, **shape).whole([length])
        assert torch.equal(
            Sequence(pool(int(rng.integers(1, 4))), length, dtype, **shape).whole(sizes), whole
        )
    record(cases=cases)


@pytest.mark.each_pair
@pytest.mark.parametrize(("path", "dtype"), EVERY_PATH, ids=str)
@pytest.mark.parametrize("start", [0, 5, 120, 127, 128, 500, 700])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_tree_branch_has_the_bits_of_the_chain(pool, path, dtype, start, window, quantized):
    """A branch of a tree has the bits of a chain: each node's path is also computed as plain tokens after the
    root."""
    parents = (-1, 0, 0, 1, 2, 2, 5, 3, 7, 6)
    tree = TokenTree((0,) * 10, parents, (0.0,) * 10, (1.0,) * 10)
    length = start + 3 + len(parents) - 1
    indices = list(range(start, length))
    sequence = Sequence(pool(2, path, dtype), length, dtype, window=window, quantized=quantized)
    if start:
        sequence.whole([start])
    in_tree = sequence.run(sequence.span(start, 3, tree), indices)
    for node in range(len(parents)):
        along = [start + 2 + ancestor for ancestor in tree.path(node)]
        for size in (len(along) + 2, 1):  # All rows at once, and the last row alone.
            rows = [start, start + 1, *along]
            replay = Sequence(pool(1, path, dtype), length, dtype, window=window, quantized=quantized)
            replay.cache.data.copy_(sequence.cache.data)
            if size == 1 and len(rows) > 1:
                replay.run(replay.span(start, len(rows) - 1), rows[:-1])
            alone = replay.run(replay.span(start + len(rows) - size, size), rows[-size:])
            assert torch.equal(alone[-1], in_tree[2 + node])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_context_split_between_threads_has_the_bits_of_one_thread(pool, dtype):
    outputs = []
    for threads in (1, 2, 5):
        sequence = Sequence(pool(threads, None, dtype), 3000, dtype, kv_heads=1)
        sequence.whole([2990])
        outputs.append(sequence.run(sequence.span(2990, 3), [2990, 2991, 2992]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_path_stores_the_same_bytes_and_reads_what_a_plain_cache_of_those_numbers_holds(
    pool, available, dtype
):
    """Every path stores the same bytes. Attention over 8-bit KV has the bits of attention over the numbers
    that the bytes represent."""
    vectors = torch.randn(40, 2, 36, generator=torch.Generator().manual_seed(1)) * torch.logspace(-42, 38, 36)
    vectors[3, 0], vectors[5, 1, 7], vectors[6, 0, 35] = 0.0, torch.nan, -torch.inf
    for path in available(pool(), dtype):
        quantized = Sequence(pool(1, path, dtype), 40, dtype, dim=36, quantized=True)
        plain = Sequence(pool(1, path, dtype), 40, dtype, dim=36)
        plain.k, plain.v = reference_numbers(quantized.k), reference_numbers(quantized.v)
        assert torch.equal(quantized.whole([40]), plain.whole([40]))
        read = dequantize_vectors(quantized.cache.data[0, quantized.blocks[:2]], dtype)
        assert torch.equal(read, plain.cache.data[0, quantized.blocks[:2]])
        quantized.v = vectors.to(dtype)
        quantized.whole([40])
        slots = quantized.cache.data[0, quantized.blocks[:3], 1].transpose(1, 2).flatten(0, 1)[:40]
        assert torch.equal(slots, reference_bytes(quantized.v))


@pytest.mark.parametrize("path", Path)
def test_large_scores_stay_finite(pool, path):
    sequence = Sequence(pool(1, path), 200, torch.bfloat16)
    sequence.q *= 300
    assert sequence.whole([200]).isfinite().all()
