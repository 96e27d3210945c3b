"""Variants of models, and their logits by the reference model and by transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch

from streamserve.contracts.plan import Span
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.loading.load import make_attention
from streamserve.execution.loading.weights import load_model
from streamserve.execution.model.layout import lay_out
from tests.checkpoints import reference_model

TEXT = torch.randint(0, 320, (1, 60), generator=torch.Generator().manual_seed(7))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
WHOLE_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
MINISTRAL_YARN = {**YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
"""Several factors of queries (`llama_4_scaling_beta`) occur in the 60 tokens of TEXT."""
MINISTRAL = {"head_dim": 16, "rope_parameters": {**MINISTRAL_YARN, "llama_4_scaling_beta": 0.5}}
WINDOWED_QWEN = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
GRANITE = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.9,
}
GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 6.0,
}
GEMMA3 = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "final_logit_softcapping": 7.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    },
}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 9,
    "rope_parameters": {**YARN, "rope_theta": 150_000.0, "truncate": False},
}
IMAGE_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [2, 3, 3]}
GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 2}
MIXTURES = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe", "mixtral", "gpt_oss", "glm4_moe")
VARIANTS = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24, "num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    ("llama", {"rope_parameters": YARN}),
    ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.4}, "head_dim": 32}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}),
    ("mistral", {"rope_parameters": WHOLE_LONGROPE}),
    ("llama", {"max_shard_size": "100KB"}),
    ("mistral", {"sliding_window": 7}),
    ("mistral", {"sliding_window": None}),
    ("ministral3", MINISTRAL),
    ("ministral3", {**MINISTRAL, "original_max_position_embeddings": 8}),
    ("ministral3", {**MINISTRAL, "head_dim": 24, "sliding_window": 9, "tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", WINDOWED_QWEN),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {**WINDOWED_QWEN, "attention_bias": True, "num_key_value_heads": 4}),
    ("phi3", {}),
    (
        "phi3",
        {
            "sliding_window": 9,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    ("granite", GRANITE),
    ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    ("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7}),
    ("gemma2", GEMMA2),
    (
        "gemma2",
        {
            "head_dim": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 8,
            "attention_bias": True,
        },
    ),
    ("gemma3_text", GEMMA3),
    (
        "gemma3_text",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "num_attention_heads": 2,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 13,
        },
    ),
    ("gemma3", {**GEMMA3, "final_logit_softcapping": None}),
    ("mistral3", {"head_dim": 16, "sliding_window": None}),
    ("mistral3", {**MINISTRAL, "model_type": "ministral3"}),
    ("qwen2_5_vl", {"rope_parameters": IMAGE_ROPE, "tie_word_embeddings": True}),
    ("qwen3_vl", {"rope_parameters": {**IMAGE_ROPE, "mrope_interleaved": True}, "head_dim": 16}),
    (
        "qwen3_vl_moe",
        {**QWEN3_MOE, "head_dim": 16, "rope_parameters": {**IMAGE_ROPE, "mrope_interleaved": True}},
    ),
    (
        "qwen3_vl_moe",
        {
            **QWEN3_MOE,
            "head_dim": 16,
            "rope_parameters": IMAGE_ROPE,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("olmoe", OLMOE),
    (
        "olmoe",
        {**OLMOE, "num_key_value_heads": 4, "norm_topk_prob": True, "attention_bias": True},
    ),
    ("qwen2_moe", QWEN2_MOE),
    (
        "qwen2_moe",
        {
            **QWEN2_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
    ),
    ("qwen3_moe", QWEN3_MOE),
    (
        "qwen3_moe",
        {
            **QWEN3_MOE,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
        },
    ),
    ("mixtral", MIXTRAL),
    ("mixtral", {**MIXTRAL, "num_experts_per_tok": 1, "sliding_window": 7, "tie_word_embeddings": True}),
    ("gpt_oss", GPT_OSS),
    ("gpt_oss", {**GPT_OSS, "attention_bias": False}),
    ("gpt_oss", {**GPT_OSS, "num_experts_per_tok": 5, "swiglu_limit": 0.6, "swiglu_alpha": 1.1}),
    ("glm4_moe", GLM4_MOE),
    (
        "glm4_moe",
        {
            **GLM4_MOE,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
]


@torch.inference_mode()
def logits_of(folder: Path, chunks: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return streamserve's logits [60, vocabulary] for TEXT, computed in chunks of these sizes."""
    spec, checkpoint = open_checkpoint(folder)
    spec = spec.at_length(TEXT.shape[1])
    model = load_model(checkpoint, spec, dtype)
    cache = KVCache(spec, 16, 4, dtype)
    attention = make_attention(cache, spec, None)
    blocks = [11, 3, 5, 15, 0, 1, 9, 2, 14, 4, 6, 13, 12, 7, 8]
    pieces, start = [], 0
    for size in chunks:
        layout = lay_out([Span(0, start, TEXT[0, start : start + size].tolist(), blocks)], 4)
        attention.plan(layout)
        tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
        pieces.append(model.logits(model.forward(tokens, positions, attention)))
        start += size
    return torch.cat(pieces)


@torch.inference_mode()
def logits_by_transformers(folder: Path, dtype: str = "float32") -> torch.Tensor:
    return reference_model(folder, dtype)(TEXT).logits[0]


def error_of(architecture: str, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the root mean square error of all rows' logits. For mixtures of experts return the median row's
    error, of the rows before the first one for which rounding chose another expert: where two experts have
    nearly equal scores, it may, and the later rows attend to that row."""
    errors = (logits.float() - truth).square().mean(1)
    if architecture not in MIXTURES:
        return errors.mean().sqrt()
    others = (errors > 25 * errors.median()).nonzero()
    return errors[: int(others[0]) if len(others) else None].median().sqrt()
