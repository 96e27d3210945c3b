"""Logits equal those of transformers, for every architecture and every division of a text into steps."""

import pytest
import torch

from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.loading.weights import load_model
from streamserve.execution.model.spec import read_spec
from tests.execution.variants import (
    GEMMA2,
    GEMMA3,
    GLM4_MOE,
    GPT_OSS,
    GRANITE,
    MINISTRAL,
    MINISTRAL_YARN,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    VARIANTS,
    WINDOWED_QWEN,
    error_of,
    logits_by_transformers,
    logits_of,
)


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
def test_float32_logits_are_those_of_transformers(shared_checkpoint, architecture, overrides):
    folder = shared_checkpoint(architecture, **overrides)
    expected = logits_by_transformers(folder)
    assert expected.std() > 1  # far from being all equal
    torch.testing.assert_close(logits_of(folder, [60]), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(folder, [13, 1, 1, 30, 15]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "with_window", "without"),
    [
        ("mistral", {"sliding_window": 7}, {"sliding_window": None}),
        ("qwen2", WINDOWED_QWEN, {}),
    ],
)
def test_a_window_shorter_than_the_text_changes_it(shared_checkpoint, architecture, with_window, without):
    sliding = logits_of(shared_checkpoint(architecture, **with_window), [60])
    full = logits_of(shared_checkpoint(architecture, **without), [60])
    torch.testing.assert_close(sliding[:7], full[:7], rtol=0, atol=1e-4)
    assert (sliding[30:] - full[30:]).abs().max() > 0.1


def test_queries_are_scaled_from_the_original_number_of_positions_on(shared_checkpoint):
    scaled = logits_of(shared_checkpoint("ministral3", **MINISTRAL), [60])
    plain = MINISTRAL_YARN | {"llama_4_scaling_beta": 0.0}
    other = logits_of(shared_checkpoint("ministral3", head_dim=16, rope_parameters=plain), [60])
    torch.testing.assert_close(scaled[:16], other[:16], rtol=0, atol=1e-4)
    assert (scaled[16:] - other[16:]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("ministral3", MINISTRAL),
        ("qwen3", {}),
        ("phi3", {}),
        ("granite", GRANITE),
        ("smollm3", {"no_rope_layers": [0, 1]}),
        ("olmo2", {}),
        ("gemma2", GEMMA2),
        ("gemma3_text", GEMMA3),
        ("olmoe", OLMOE),
        ("qwen2_moe", QWEN2_MOE),
        ("qwen3_moe", QWEN3_MOE),
        ("mixtral", MIXTRAL),
        ("gpt_oss", GPT_OSS),
        ("glm4_moe", GLM4_MOE),
    ],
    ids=str,
)
def test_bfloat16_is_as_close_to_the_truth_as_transformers(shared_checkpoint, architecture, overrides):
    folder = shared_checkpoint(architecture, "bfloat16", **overrides)
    truth = logits_by_transformers(folder, "float32")
    reference_error = error_of(architecture, logits_by_transformers(folder, "bfloat16"), truth)
    logits = logits_of(folder, [40, 1, 19], torch.bfloat16)
    assert logits.dtype == torch.bfloat16
    assert error_of(architecture, logits, truth) < 1.2 * reference_error


def test_a_tied_head_in_float32_shares_the_embedding(shared_checkpoint):
    folder = shared_checkpoint("qwen2", tie_word_embeddings=True)
    model = load_model(Checkpoint(folder), read_spec(folder), torch.float32)
    assert model.head.weight is model.embedding
