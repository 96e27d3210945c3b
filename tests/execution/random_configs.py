"""Random configs of small models. Fields that transformers knows are present or absent, in the spellings of
its versions 4 and 5."""

import random
from collections.abc import Mapping
from typing import Any

ABSENT: Any = object()
"""A field with this value is left out."""

Values = Mapping[str, tuple[Any, ...]]
"""Fields, and the values to choose from."""

ORIGINAL = "original_max_position_embeddings"

ROPES: dict[str, Values] = {
    "default": {},
    "linear": {"factor": (2.0, 3.5)},
    "dynamic": {"factor": (2.0,)},
    "llama3": {
        "factor": (4.0, 8.0), "low_freq_factor": (0.5, 1.0), "high_freq_factor": (2.0, 4.0),
        ORIGINAL: (ABSENT, 16, 64),
    },
    "yarn": {
        "factor": (2.0, 8.0), ORIGINAL: (ABSENT, 16, 64), "beta_fast": (ABSENT, 4.0, 32.0),
        "beta_slow": (ABSENT, 0.5, 1.0), "truncate": (ABSENT, True, False), "mscale": (ABSENT, 0.7, 1.0),
        "mscale_all_dim": (ABSENT, 0.8, 1.0), "attention_factor": (ABSENT, ABSENT, 1.3),
    },
}  # fmt: skip
"""The parameters of rotary embeddings, by kind."""

QUERY_SCALING: Values = {"llama_4_scaling_beta": (0.0, 0.3, 1.0), ORIGINAL: (ABSENT, 8, 16)}
"""The other rope parameters of Ministral 3."""

SIZES: Values = {
    "vocab_size": (320,),
    "hidden_size": (32, 48, 64),
    "intermediate_size": (24, 40),
    "num_hidden_layers": (1, 2, 3),
    "num_attention_heads": (2, 4),
    "num_key_value_heads": (1, 2),
    "max_position_embeddings": (64, 128, 512),
    "rms_norm_eps": (ABSENT, 1e-2),
    "hidden_act": (*(ABSENT,) * 5, "silu", "gelu"),
    "attention_bias": (ABSENT, False, True),
    "mlp_bias": (ABSENT, False, True),
    "head_dim": (8, 12, 16, 24),
    "rope_theta": (ABSENT, 1e3, 1e6),
    "partial_rotary_factor": (ABSENT, ABSENT, 1.0),
    ORIGINAL: (*(ABSENT,) * 3, 32),
    "sliding_window": (ABSENT, None, 7),
    "use_sliding_window": (ABSENT, False, True),
    "max_window_layers": (ABSENT, 0, 1),
    "eos_token_id": (3,),
    "pad_token_id": (None,),
}  # fmt: skip
"""Fields of every architecture. Some architectures ignore some of them."""

WITHOUT_HEAD_DIM: Values = {"head_dim": (ABSENT,)}
TIED: Values = {"tie_word_embeddings": (ABSENT, False, True)}
CHOSEN: Values = {"num_experts_per_tok": (1, 2, 3), "norm_topk_prob": (ABSENT, False, True)}
SPARSE: Values = {"decoder_sparse_step": (ABSENT, 1, 2), "mlp_only_layers": (ABSENT, [], [0], [1, -1])}
EXPERTS: Values = {"num_experts": (3, 5, 8), "moe_intermediate_size": (16, 20), **CHOSEN, **SPARSE}
GEMMA: Values = {
    **TIED, "sliding_window": (7,), "query_pre_attn_scalar": (ABSENT, 16), "hidden_act": (ABSENT,),
    "hidden_activation": (ABSENT, "gelu_pytorch_tanh"), "final_logit_softcapping": (ABSENT, None, 5.0),
}  # fmt: skip

FAMILIES: dict[str, Values] = {
    "llama": TIED,
    "mistral": TIED,
    "ministral3": TIED,
    "qwen2": {**TIED, **WITHOUT_HEAD_DIM},
    "qwen3": TIED,
    "granite": {
        **TIED, **WITHOUT_HEAD_DIM, "embedding_multiplier": (ABSENT, 1.7), "logits_scaling": (ABSENT, 0.9),
        "residual_multiplier": (ABSENT, 0.6), "attention_multiplier": (ABSENT, 0.4),
    },
    "smollm3": {
        **TIED, **WITHOUT_HEAD_DIM, "no_rope_layer_interval": (ABSENT, 2),
        "no_rope_layers": (ABSENT, [1, 0, 1]),
    },
    "olmo2": {**TIED, **WITHOUT_HEAD_DIM},
    "olmoe": {
        **CHOSEN, **TIED, **WITHOUT_HEAD_DIM, "num_experts": (3, 5, 8),
        "clip_qkv": (*(ABSENT,) * 4, None, 2.0),
    },
    "gemma2": {**GEMMA, "attn_logit_softcapping": (ABSENT, None, 3.0)},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": (ABSENT, 2)},
    "qwen2_moe": {**EXPERTS, **TIED, **WITHOUT_HEAD_DIM, "shared_expert_intermediate_size": (12, 40)},
    "qwen3_moe": {**EXPERTS, **TIED},
    "mixtral": {**TIED, "num_local_experts": (3, 5), "num_experts_per_tok": (1, 2)},
    "gpt_oss": {
        **TIED, "num_local_experts": (3, 5), "num_experts_per_tok": (1, 2), "sliding_window": (7,),
    },
    "glm4_moe": {
        **CHOSEN, **TIED, "n_routed_experts": (6, 12), "moe_intermediate_size": (16, 20),
        "n_shared_experts": (ABSENT, 1, 2, 3), "n_group": (ABSENT, 1, 2, 3), "topk_group": (ABSENT, 1, 2),
        "first_k_dense_replace": (ABSENT, 0, 1, 2, 5), "use_qk_norm": (ABSENT, False, True),
        "routed_scaling_factor": (*(ABSENT,) * 3, 0.0, -1.0, 0.4, 2.5),
        "num_nextn_predict_layers": (ABSENT, 0, 1),
        "partial_rotary_factor": (ABSENT, 0.25, 0.5, 1.0),
    },
    "qwen2_5_vl": WITHOUT_HEAD_DIM,
    "qwen3_vl": {},
    "qwen3_vl_moe": EXPERTS,
    "mistral3": {},
}  # fmt: skip
"""The other fields, or other values, by model type in transformers."""

TEXT_TYPES = {
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "mistral3": ("mistral", "ministral3"),
}
"""The possible model types of the text parts of multimodal models."""


def random_config(rng: random.Random, family: str, vision: dict[str, Any] | None) -> dict[str, Any]:
    """Return a random config of the model type `family`, without `architectures`. If it has a `vision` tower,
    the text model's fields are nested."""
    text_type = rng.choice(TEXT_TYPES.get(family, (family,)))
    fields = _chosen(rng, {**SIZES, **FAMILIES[family]})
    spelling = rng.choice(("rope_parameters", "rope_scaling", None))
    if spelling or text_type in ("ministral3", "gpt_oss"):
        fields[spelling or "rope_parameters"] = _rope(rng, fields, text_type)
    if vision is None:
        return {"model_type": family, **fields}
    if "out_hidden_size" in vision:
        vision = vision | {"out_hidden_size": fields["hidden_size"]}
    nested = {"text_config": {"model_type": text_type, **fields}, "vision_config": vision}
    return {"model_type": family, **nested, **_chosen(rng, TIED)}


def field_names(config: dict[str, Any]) -> set[str]:
    """Return the names of all fields of a config, and of its nested objects."""
    nested = [value for value in config.values() if isinstance(value, dict)]
    return set(config).union(*map(field_names, nested))


def _rope(rng: random.Random, fields: dict[str, Any], text_type: str) -> dict[str, Any]:
    """Return the rope parameters of a model with `fields`."""
    kind = rng.choice(list(ROPES))
    parameters = _chosen(rng, {**ROPES[kind], "rope_theta": (ABSENT, 500.0)})
    parameters[rng.choice(("type", "rope_type"))] = kind
    if text_type == "ministral3":
        parameters |= _chosen(rng, QUERY_SCALING)
    if "_vl" in text_type:
        half = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"]) // 2
        parameters["mrope_section"] = [half - 2, 1, 1]
    return parameters


def _chosen(rng: random.Random, values: Values) -> dict[str, Any]:
    chosen = {name: rng.choice(choices) for name, choices in values.items()}
    return {name: value for name, value in chosen.items() if value is not ABSENT}
