"""Whole models on the kernels: as close to the truth as torch is, and the same bits for any chunks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path as Folder

import pytest
import torch

from streamserve.engine.plan import Span
from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.layout import lay_out
from streamserve.execution.native.attention import NativeAttention
from streamserve.execution.native.library import Path, ThreadPool
from streamserve.execution.native.linear import NativeLinear
from streamserve.execution.native.model import NativeModel
from streamserve.execution.spec import read_spec
from streamserve.execution.weights import LinearMakers, load_model
from tests.execution.test_model import TEXT, VARIANTS, logits_by_transformers
from tests.execution.test_model import logits_of as reference_logits

BLOCKS = [11, 3, 5, 15, 0, 1, 9, 2, 14, 4, 6, 13, 12, 7, 8]


@torch.inference_mode()
def logits_of(folder: Folder, chunks: Sequence[int], dtype: torch.dtype, pool: ThreadPool) -> torch.Tensor:
    """The kernels' logits [60, vocabulary] for TEXT, fed in chunks of these sizes."""
    spec = read_spec(folder)
    linear = partial(NativeLinear, pool, dtype=dtype)
    makers = LinearMakers(linear, partial(linear, paired=True), linear)
    model = NativeModel.of(load_model(Checkpoint(folder), spec, dtype, makers), pool)
    cache = KVCache(spec, 16, 4, dtype)
    cache.data.fill_(torch.nan)
    attention = NativeAttention(pool, cache, spec.windows, spec.num_heads // spec.num_kv_heads)
    pieces, start = [], 0
    for size in chunks:
        layout = lay_out([Span(0, start, TEXT[0, start : start + size].tolist(), BLOCKS)], 4)
        attention.plan(layout)
        tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
        pieces.append(model.logits(model.forward(tokens, positions, attention)))
        start += size
    return torch.cat(pieces)


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
def test_float32_logits_are_those_of_transformers(shared_checkpoint, pool, architecture, overrides):
    folder = shared_checkpoint(architecture, **overrides)
    expected = logits_by_transformers(folder)
    for path in (Path.PORTABLE, None):
        logits = logits_of(folder, [60], torch.float32, pool(2, path, torch.float32))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        parts = logits_of(folder, [13, 1, 1, 30, 15], torch.float32, pool(1, path, torch.float32))
        assert torch.equal(parts, logits)


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
@pytest.mark.parametrize("path", Path)
def test_bfloat16_is_as_close_to_the_truth_as_torch(shared_checkpoint, pool, path, architecture, overrides):
    folder = shared_checkpoint(architecture, "bfloat16", **overrides)
    truth = reference_logits(folder, [60], torch.float32)
    reference_error = (reference_logits(folder, [60], torch.bfloat16).float() - truth).square().mean().sqrt()
    logits = logits_of(folder, [60], torch.bfloat16, pool(2, path))
    assert logits.dtype == torch.float32
    assert (logits - truth).square().mean().sqrt() < 1.15 * reference_error
    assert torch.equal(logits_of(folder, [13, 1, 1, 30, 15], torch.bfloat16, pool(1, path)), logits)


@pytest.mark.parametrize("path", Path)
def test_sizes_that_fill_no_tile(shared_checkpoint, pool, path):
    """Widths that are multiples of nothing, after a larger model has used the same memory."""
    pool(1, path)
    larger = shared_checkpoint("llama", "bfloat16")
    logits_of(larger, [60], torch.bfloat16, pool(1, path))
    odd = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 1}
    folder = shared_checkpoint("llama", "bfloat16", head_dim=12, **odd)
    truth = reference_logits(folder, [60], torch.float32)
    logits = logits_of(folder, [59, 1], torch.bfloat16, pool(1, path))
    reference_error = (reference_logits(folder, [60], torch.bfloat16).float() - truth).square().mean().sqrt()
    assert (logits - truth).square().mean().sqrt() < 1.25 * reference_error
