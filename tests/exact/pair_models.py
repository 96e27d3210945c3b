"""Architectures of target and draft pairs whose texts are compared with plain decoding."""

from dataclasses import dataclass, field
from typing import Any

from tests.exact.speculating import Case


@dataclass(frozen=True)
class Model:
    """A model, and the settings of the engine that drafts for it."""

    case: Case
    fields: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "ministral3": Model(
        Case(draft="self:1", policy="fixed-tree:2x3", kv_cache_dtype="int8", chunk=7),
        {"head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        }},
    ),
    "phi3": Model(
        Case(draft="self:1", policy="fixed-tree:2x3", quantization="int8", preempt_every=7),
        {"sliding_window": 60, "head_dim": 16, "original_max_position_embeddings": 64, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        }},
    ),
    "granite": Model(
        Case(draft="self:1", policy="fixed-tree:2x3", kv_cache_dtype="int8", blocks=24),
        {"embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.4,
         "logits_scaling": 0.9},
    ),
    "smollm3": Model(
        Case(policy="fixed-tree:3x3", chunk=7), {"no_rope_layer_interval": 2, "tie_word_embeddings": True}
    ),
    "olmo2": Model(Case(policy="fixed:4", quantization="int8", kv_cache_dtype="int8", preempt_every=5)),
    "gemma2": Model(
        Case(policy="fixed-tree:2x3", blocks=24, kv_cache_dtype="int8"),
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 48, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 6.0},
    ),
    "gemma3_text": Model(
        Case(draft="self:1", policy="fixed-tree:2x3", quantization="int4:32", chunk=7),
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 48, "sliding_window_pattern": 2},
    ),
    "qwen2_moe": Model(
        Case(policy="fixed-tree:3x3", quantization="int4:32", preempt_every=7),
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
         "shared_expert_intermediate_size": 80},
    ),
    "qwen3_moe": Model(
        Case(draft="self:1", policy="fixed-tree:2x3", kv_cache_dtype="int8", blocks=24),
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 32},
    ),
    "olmoe": Model(
        Case(policy="fixed-tree:2x3", quantization="w8a8", blocks=24),
        {"num_experts": 6, "num_experts_per_tok": 2},
    ),
    "mixtral": Model(
        Case(policy="fixed:4", quantization="int8", chunk=7),
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": Model(
        Case(draft="self:1", policy="fixed-tree:2x3", kv_cache_dtype="int8", preempt_every=5),
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 48,
         "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False,
            "original_max_position_embeddings": 128,
        }},
    ),
    "glm4_moe": Model(
        Case(draft="self:2", policy="fixed-tree:2x3", quantization="int4:32", blocks=24),
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32,
         "num_hidden_layers": 3, "routed_scaling_factor": 1.5, "attention_bias": True},
    ),
}  # fmt: skip
