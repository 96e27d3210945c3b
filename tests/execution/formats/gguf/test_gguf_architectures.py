"""For all architectures, a GGUF file gives the model of the folder that it was made from, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from streamserve.execution.loading.load import load
from streamserve.execution.model.spec import read_spec
from tests.execution.gguf_entries import entry
from tests.execution.gguf_loading import Shared, config, logits_of, refusal
from tests.execution.variants import GLM4_MOE, IMAGE_ROPE, QWEN3_MOE, logits_by_transformers
from tests.ggufs import write_gguf

YARN = {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
PHI = {
    "rope_theta": 10_000.0, "rope_type": "longrope", "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.5, 8.0],
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 9,
    "rope_parameters": {**YARN, "truncate": False},
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32, "sliding_window": 9, "num_hidden_layers": 7, "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 40, "original_max_position_embeddings": 128}),
    "phi4-mini": (
        "phi3",
        {"rope_parameters": PHI, "original_max_position_embeddings": 128, "sliding_window": None,
         "tie_word_embeddings": True},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.22,
         "logits_scaling": 8.0, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 5, "sliding_window": 9, "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "mistral3": (
        "ministral3",
        {"head_dim": 32, "rope_parameters": {
            **YARN, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
        }},
    ),
    "qwen2vl": ("qwen2_5_vl", {"rope_parameters": IMAGE_ROPE, "head_dim": 16}),
    "qwen3vl": (
        "qwen3_vl", {"rope_parameters": {**IMAGE_ROPE, "mrope_interleaved": True}, "head_dim": 16}
    ),
    "qwen3vlmoe": (
        "qwen3_vl_moe",
        {**QWEN3_MOE, "rope_parameters": {**IMAGE_ROPE, "mrope_interleaved": True}, "head_dim": 16},
    ),
    "glm4moe": (
        "glm4_moe",
        {**GLM4_MOE, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 2},
    ),
    "glm4moe without norms": (
        "glm4_moe", {**GLM4_MOE, "use_qk_norm": False, "norm_topk_prob": False, "attention_bias": True}
    ),
    "qwen3 yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_of_its_folder(shared_checkpoint: Shared, tmp_path: Path, name: str) -> None:
    architecture, fields = MODELS[name]
    source = shared_checkpoint(architecture, pad_token_id=0, **fields)
    write_gguf(source, tmp_path / "model.gguf")
    loaded, original = (load(config(path, max_model_len=128)) for path in (tmp_path / "model.gguf", source))
    spec, expected = loaded.model.spec, read_spec(source)
    assert spec.architecture == expected.architecture
    assert spec.windows == expected.windows
    assert [rope is None for rope in spec.ropes] == [rope is None for rope in expected.ropes]
    logits = logits_of(loaded)
    assert torch.equal(logits, logits_of(original))
    torch.testing.assert_close(logits, logits_by_transformers(source), rtol=0, atol=1e-4)


def without_short_factors(writer: gguf.GGUFWriter) -> None:
    del writer.tensors[-1]["rope_factors_short.weight"]


def yarn(name: str, value: float) -> Callable[[gguf.GGUFWriter], None]:
    return entry(f"qwen3.rope.scaling.yarn_{name}", value)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gemma2", entry("gemma2.attention.sliding_window_pattern", [True]), "array of 2 finite numbers"),
        ("gemma2", entry("gemma2.attention.scale", 0.1), "gemma2.attention.scale is not supported"),
        (
            "gemma2",
            entry("gemma2.attn_logit_softcapping", -1.0),
            "must be a number from 0 to 1000000, not -1",
        ),
        ("granite", entry("granite.rope.scaling.finetuned", False), "false is not supported: no layer is"),
        ("granite", entry("granite.logit_scale", 0.0), "must be a number from 1e-06 to 1000000, not 0.0"),
        ("smollm3", entry("smollm3.attention.sliding_window", 9), "does not say which layers use it"),
        ("phi4-mini", without_short_factors, "rope_factors_short.weight is missing"),
        ("phi4-mini", entry("phi3.rope.dimension_count", 7), "must be even and at most 16, not 7"),
        ("gpt-oss", entry("gpt-oss.expert_count", None), "gpt-oss.expert_count is missing"),
        ("gpt-oss", entry("gpt-oss.swiglu_clamp_exp", [5.0]), "swiglu_clamp_exp is not supported"),
        (
            "mistral3",
            entry("mistral3.rope.scaling.yarn_attn_factor", 1.5),
            "yarn_attn_factor 1.5 is not supported (supported: 1)",
        ),
        ("qwen3vl", entry("qwen3vl.rope.dimension_sections", [2, 3, 2, 1]), "must have sections of time"),
        ("glm4moe", entry("glm4moe.expert_gating_func", 1), "expert_gating_func is not supported"),
        ("glm4moe", entry("glm4moe.expert_group_count", 3), "3 does not divide 8 experts"),
        ("glm4moe", entry("glm4moe.expert_shared_count", 1), "contradicts the shared expert's 80 inner"),
        ("glm4moe", entry("glm4moe.expert_group_used_count", 5), "must be an integer from 1 to 4, not 5"),
        ("glm4moe", entry("glm4moe.nextn_predict_layers", 9), "must be an integer from 0 to"),
        ("qwen3 yarn", entry("qwen3.attention.temperature_scale", 0.1), "temperature_scale is not supported"),
        ("qwen3 yarn", yarn("attn_factor", 1.0), "yarn_attn_factor 1 is not supported (supported: 1.13863)"),
        ("qwen3 yarn", yarn("ext_factor", 0.5), "yarn_ext_factor 0.5 is not supported (supported: 1)"),
        ("qwen3 yarn", yarn("beta_fast", 0.5), "must be above the 1 of yarn_beta_slow, not 0.5"),
    ],
)
def test_what_another_computation_needs_is_refused(
    shared_checkpoint: Shared,
    tmp_path: Path,
    name: str,
    change: Callable[[gguf.GGUFWriter], None],
    reason: str,
) -> None:
    architecture, fields = MODELS[name]
    source = shared_checkpoint(architecture, pad_token_id=0, **fields)
    write_gguf(source, tmp_path / "model.gguf", change=change)
    assert reason in refusal(tmp_path / "model.gguf")
