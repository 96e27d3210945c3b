"""Whole models on the kernels are as exact as in torch, and have the same bits for any chunks."""

import pytest
import torch

from streamserve.contracts.plan import Span
from streamserve.execution.backends.native.library import Path
from tests.execution.backends.native.forwarding import BLOCKS, forward, logits_of, model_of
from tests.execution.variants import TEXT, VARIANTS, error_of, logits_by_transformers
from tests.execution.variants import logits_of as reference_logits

FURTHER = [variant for variant in VARIANTS if variant[0] not in ("llama", "mistral", "qwen2", "qwen3")]


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
def test_float32_logits_are_those_of_transformers(shared_checkpoint, pool, architecture, overrides):
    folder = shared_checkpoint(architecture, **overrides)
    expected = logits_by_transformers(folder)
    for path in (Path.PORTABLE, None):
        logits = logits_of(folder, [60], torch.float32, pool(2, path, torch.float32))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        parts = logits_of(folder, [13, 1, 1, 30, 15], torch.float32, pool(1, path, torch.float32))
        assert torch.equal(parts, logits)


@pytest.mark.each_value
@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
@pytest.mark.parametrize("path", Path)
def test_bfloat16_is_as_close_to_the_truth_as_torch(shared_checkpoint, pool, path, architecture, overrides):
    folder = shared_checkpoint(architecture, "bfloat16", **overrides)
    truth = reference_logits(folder, [60], torch.float32)
    reference_error = error_of(architecture, reference_logits(folder, [60], torch.bfloat16), truth)
    logits = logits_of(folder, [60], torch.bfloat16, pool(2, path))
    assert logits.dtype == torch.float32
    assert error_of(architecture, logits, truth) < 1.15 * reference_error
    assert torch.equal(logits_of(folder, [13, 1, 1, 30, 15], torch.bfloat16, pool(1, path)), logits)


@pytest.mark.each_value
@pytest.mark.parametrize(("architecture", "overrides"), FURTHER, ids=str)
@pytest.mark.parametrize("path", Path)
def test_a_rows_bits_do_not_depend_on_the_batch(shared_checkpoint, pool, path, architecture, overrides):
    model, attention = model_of(shared_checkpoint(architecture, "bfloat16", **overrides), pool(2, path))
    texts = TEXT[0].view(3, 20).tolist()
    spans = [Span(n, 0, text, BLOCKS[5 * n :][:5]) for n, text in enumerate(texts)]
    alone = [forward(model, attention, [span]) for span in spans]
    assert torch.equal(forward(model, attention, spans), torch.cat(alone))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", {"head_dim": 12}),
        ("qwen3", {"head_dim": 30, "num_key_value_heads": 1}),
        ("olmo2", {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ("gemma2", {"hidden_size": 44, "head_dim": 16}),
    ],
    ids=str,
)
def test_norms_of_sizes_that_fill_no_vector(shared_checkpoint, pool, architecture, overrides):
    """Norms of heads and of outputs replace the numbers that they normalize: each number once."""
    folder = shared_checkpoint(architecture, **overrides)
    expected = logits_by_transformers(folder)
    for path in (Path.PORTABLE, None):
        logits = logits_of(folder, [60], torch.float32, pool(1, path, torch.float32))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("path", Path)
def test_sizes_that_fill_no_tile(shared_checkpoint, pool, path):
    """Sizes that fill no tile work, after a larger model has used the same memory."""
    pool(1, path)
    larger = shared_checkpoint("llama", "bfloat16")
    logits_of(larger, [60], torch.bfloat16, pool(1, path))
    odd = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 1}
    folder = shared_checkpoint("llama", "bfloat16", head_dim=12, **odd)
    truth = reference_logits(folder, [60], torch.float32)
    logits = logits_of(folder, [59, 1], torch.bfloat16, pool(1, path))
    reference_error = (reference_logits(folder, [60], torch.bfloat16).float() - truth).square().mean().sqrt()
    assert (logits - truth).square().mean().sqrt() < 1.25 * reference_error
