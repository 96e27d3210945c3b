"""Paged, ragged attention gives the same result as a dense softmax over each row's visible tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.contracts.plan import Span
from streamserve.execution.backends.reference.attention import QUERY_TILE, ReferenceAttention
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.layout import lay_out
from tests.execution.dense_attention import dense
from tests.execution.kv_spec import SPEC
from tests.execution.strategies import Step, steps

DIM = SPEC.head_dim


def attend_step(step: Step, kv_heads: int, group: int, windows: tuple[int | None, ...]):
    """Run a step on a cache full of random history; return its layout, queries, cache, and each layer's
    output."""
    spec = replace(SPEC, num_heads=kv_heads * group, num_kv_heads=kv_heads)
    cache = KVCache(spec, step.num_blocks, step.block_size, torch.float32)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    attention = ReferenceAttention(cache, windows, group)
    layout = lay_out(step.spans, step.block_size)
    attention.plan(layout)
    # each sequence's vectors come from a separate generator, so that other sequences do not change them
    parts = [
        torch.randn(
            part.span.query_tokens,
            (group + 2) * kv_heads,
            DIM,
            generator=torch.Generator().manual_seed(part.span.sequence),
        )
        for part in layout.parts
    ]
    qkv = torch.cat(parts)
    heads = group * kv_heads
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    outputs = [attention.run(layer, q, k, v) for layer in range(len(windows))]
    return layout, q, cache, outputs


@settings(max_examples=60, deadline=None)
@given(
    step=steps(),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 20),
)
def test_attention_is_a_dense_masked_softmax(step, kv_heads, group, window):
    windows = (window, None)
    layout, q, cache, outputs = attend_step(step, kv_heads, group, windows)
    for part in layout.parts:
        for row in range(part.span.query_tokens):
            at = part.offset + row
            for layer in range(2):
                expected = dense(part, row, q[at], cache.data[layer], windows[layer])
                torch.testing.assert_close(outputs[layer][at].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(step=steps(), window=st.none() | st.integers(1, 20))
def test_a_sequences_bits_do_not_depend_on_co_batched_sequences(step, window):
    layout, _, _, together = attend_step(step, 2, 2, (window, None))
    for part in layout.parts:
        alone = Step([part.span], step.num_blocks, step.block_size)
        _, _, _, outputs = attend_step(alone, 2, 2, (window, None))
        for layer in range(2):
            rows = slice(part.offset, part.offset + part.span.query_tokens)
            assert torch.equal(outputs[layer], together[layer][rows])


@pytest.mark.parametrize("window", [None, 40, 200])
def test_a_chunk_of_several_tiles_is_the_same_as_its_tokens_one_by_one(window):
    rows, start = 2 * QUERY_TILE + 17, 23
    blocks = np.random.default_rng(0).permutation(40).tolist()
    span = Span(0, start, [0] * rows, blocks)
    layout, q, cache, (out, _) = attend_step(Step([span], 40, 16), 1, 2, (window, None))
    assert rows > 2 * QUERY_TILE
    for row in (0, 1, QUERY_TILE - 1, QUERY_TILE, 2 * QUERY_TILE, rows - 1):
        expected = dense(layout.parts[0], row, q[row], cache.data[0], window)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_an_unreached_slot_of_a_block_is_never_read():
    """A slot that was not written is never read, even if it holds infinities left by the block's last
    owner."""
    spec = replace(SPEC, num_layers=1)
    cache = KVCache(spec, 2, 4, torch.float32)
    cache.data.fill_(torch.nan)
    attention = ReferenceAttention(cache, (None,), 2)
    attention.plan(lay_out([Span(0, 0, [1, 2, 3, 4, 5], [1, 0])], 4))
    q, k, v = torch.randn(5, 6, DIM), torch.randn(5, 3, DIM), torch.randn(5, 3, DIM)
    assert attention.run(0, q, k, v).isfinite().all()
