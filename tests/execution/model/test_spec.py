"""A config is read in the same way as by transformers, in the spelling of both its versions, or refused by
name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.execution.model.rope import inverse_frequencies
from streamserve.execution.model.rope_spec import QueryScaling, RopeSpec
from streamserve.execution.model.spec import ModelSpec, read_spec
from streamserve.protocol.errors import CheckpointError

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ORIGINAL = "original_max_position_embeddings"
YARN = {"type": "yarn", "factor": 4.0, ORIGINAL: 128}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(folder: Path, architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelSpec:
    """Return the spec of SMALL with `fields` changed. A field with the value ... is left out."""
    config = {"architectures": [architecture], **SMALL, **fields}
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("absent", [(), ("num_key_value_heads",), ("head_dim",), ("sliding_window",)])
@pytest.mark.parametrize("sliding", [False, True])
def test_fields_left_out_mean_what_they_mean_to_transformers(tmp_path, name, absent, sliding):
    import transformers

    fields = {"num_attention_heads": 32, "hidden_size": 256, "head_dim": 16, "sliding_window": 9}
    fields |= {"use_sliding_window": sliding, "max_window_layers": 2} | dict.fromkeys(absent, ...)
    spec = read(tmp_path, f"{name}ForCausalLM", **fields)
    config = getattr(transformers, f"{name}Config").from_pretrained(tmp_path)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == getattr(config, "head_dim", 256 // 32)
    if name == "Llama":
        assert spec.windows == (None,) * 4
    elif name == "Mistral":
        assert spec.windows == (config.sliding_window,) * 4
    else:
        assert spec.windows == tuple(
            config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
        )


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
MIXTURES = {
    "Qwen2Moe": {"num_experts": 4, **EXPERTS},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": YARN},
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    "absent", [(), ("num_key_value_heads", "head_dim"), ("sliding_window", "rms_norm_eps")]
)
@pytest.mark.parametrize("sliding", [False, True])
def test_fields_left_out_of_a_mixture_mean_what_they_mean_to_transformers(tmp_path, name, absent, sliding):
    import transformers

    fields = {"num_attention_heads": 32, "hidden_size": 256, "head_dim": 16, "sliding_window": 9}
    fields |= {"use_sliding_window": sliding, "max_window_layers": 2, **MIXTURES[name]}
    spec = read(tmp_path, f"{name}ForCausalLM", **fields | dict.fromkeys(absent, ...))
    config = getattr(transformers, f"{name}Config").from_pretrained(tmp_path)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 256 // 32)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.ropes[0].theta == config.rope_parameters["rope_theta"]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
    assert spec.windows == tuple(
        config.sliding_window or None if kind == "sliding_attention" else None for kind in kinds
    )
    assert spec.experts
    assert spec.experts.layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (1,)),
        ({"decoder_sparse_step": 5}, None),
    ],
)
def test_layers_with_experts_are_those_that_the_config_says(tmp_path, fields, expected):
    experts = read(tmp_path, "Qwen3MoeForCausalLM", **MIXTURES["Qwen3Moe"] | fields).experts
    assert (experts and experts.layers) == expected


GLM4_MOE = {"n_routed_experts": 8, **EXPERTS}


def test_fields_left_out_of_glm4_moe_mean_what_they_mean_to_transformers(tmp_path):
    from transformers import Glm4MoeConfig

    spec = read(tmp_path, "Glm4MoeForCausalLM", **GLM4_MOE)
    config, experts = Glm4MoeConfig.from_pretrained(tmp_path), spec.experts
    assert experts
    assert experts.layers == tuple(range(config.first_k_dense_replace, 4)) == (1, 2, 3)
    assert (experts.groups, experts.chosen_groups) == (config.n_group, config.topk_group)
    assert (experts.normalized, experts.scale) == (config.norm_topk_prob, config.routed_scaling_factor)
    assert experts.shared_size == config.n_shared_experts * 8
    assert spec.rotary_dim == spec.head_dim * config.rope_parameters["partial_rotary_factor"] == 8
    assert (spec.qk_norm != "none") == config.use_qk_norm
    assert spec.predictors == config.num_nextn_predict_layers == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_routed_experts": ...}, "n_routed_experts is missing"),
        ({"n_group": 3}, "n_group 3 does not divide 8 experts"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 does not divide 8 experts into groups of 2 or more"),
        ({"n_group": 4, "topk_group": 5}, "topk_group 5 of 4 groups do not suffice for 2"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "topk_group 1 of 4 groups do not suffice for 3"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers, not -1"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers must be a number of layers, not True"),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta is not supported"),
    ],
)
def test_a_glm4_moe_that_cannot_be_computed_is_refused(tmp_path, fields, reason):
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        read(tmp_path, "Glm4MoeForCausalLM", **GLM4_MOE | fields)


def test_ministral_scales_queries_with_what_its_rope_parameters_say(tmp_path):
    scaled = read(tmp_path, "Ministral3ForCausalLM", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1})
    assert scaled.query_scaling == QueryScaling(0.1, 128)
    assert read(tmp_path, "Ministral3ForCausalLM", rope_parameters=YARN).query_scaling is None
    with pytest.raises(CheckpointError, match="rope_scaling is missing"):
        read(tmp_path, "Ministral3ForCausalLM")


@pytest.mark.parametrize(
    ("kind", "inner", "outer", "expected"),
    [
        ("yarn", 128, 64, 64),
        ("yarn", 128, None, 128),
        ("yarn", None, 64, 64),
        ("yarn", None, None, SMALL["max_position_embeddings"]),
        ("default", 128, 64, 128),
    ],
)
def test_ministral_scales_queries_by_the_original_number_of_positions(tmp_path, kind, inner, outer, expected):
    """As in transformers: with "yarn" the number at the top of the config has precedence; with "default" only
    the number in the rope parameters is used."""
    rope = {"rope_type": kind, "factor": 4.0, "llama_4_scaling_beta": 0.1, ORIGINAL: inner}
    spec = read(tmp_path, "Ministral3ForCausalLM", rope_parameters=rope, **{ORIGINAL: outer})
    assert spec.query_scaling == QueryScaling(0.1, expected)


def test_ministral_without_an_original_number_of_positions_is_refused(tmp_path):
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    with pytest.raises(CheckpointError, match=f"rope_parameters: {ORIGINAL} is missing"):
        read(tmp_path, "Ministral3ForCausalLM", rope_parameters=rope, **{ORIGINAL: 64})


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_both_spellings_of_a_config_mean_the_same(tmp_path, name, own, kind):
    scaling = {"default": {}, "linear": {"factor": 4.0}, "llama3": LLAMA3_SCALING}[kind]
    theta, architecture = 500_000.0, f"{name}ForCausalLM"
    old = {
        "rope_theta": theta,
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
        "torch_dtype": "bfloat16",
    }
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling}, "dtype": "bfloat16"}
    spec = read(tmp_path, architecture, **SMALL | own | old)
    assert spec == read(tmp_path, architecture, **SMALL | own | new)
    assert spec.dtype == "bfloat16"
    rope = spec.ropes[0]
    assert spec.ropes == (rope,) * 4
    assert (rope.scaling, rope.theta, rope.factor) == (kind, theta, scaling.get("factor", 1.0))


def test_the_oldest_spelling_of_a_rope_type_is_understood(tmp_path):
    spec = read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert spec.ropes[0] == RopeSpec(10_000.0, "linear", 2.0)


def test_llama3_falls_back_to_the_models_own_positions(tmp_path):
    scaling = LLAMA3_SCALING | {"rope_type": "llama3"}
    del scaling["original_max_position_embeddings"]
    assert read(tmp_path, rope_scaling=scaling).ropes[0].original_positions == 512


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False, "none")),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, "none")),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True, "none")),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, (False, False, False, "none")),
        ("Qwen2ForCausalLM", {}, (True, False, False, "none")),
        ("Qwen3ForCausalLM", {}, (False, False, False, "heads")),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, "heads")),
    ],
)
def test_biases_and_norms_are_those_of_the_architecture(tmp_path, architecture, fields, expected):
    spec = read(tmp_path, architecture, **fields)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm) == expected


def test_layer_types_place_the_windows_of_qwen(tmp_path):
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    fields = {"layer_types": types, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4}
    assert read(tmp_path, "Qwen3ForCausalLM", **fields).windows == (6, None, None, 6)


def test_mistral_without_a_window_has_none(tmp_path):
    assert read(tmp_path, "MistralForCausalLM", sliding_window=None).windows == (None,) * 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures 'GPT2LMHeadModel'"),
        ({"architectures": ["LlamaModel"]}, "architectures 'LlamaModel'"),
        ({"architectures": ...}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_type 'proportional'"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}}, "rope_type ['yarn']"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "factor must be from 1"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast must be above beta_slow 1, not 0.5"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate must be true or false"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor must be a positive number"),
        ({"rope_scaling": YARN | {"mscale": -1, "mscale_all_dim": 1}}, "mscale must be a positive number"),
        ({"rope_scaling": YARN | {"rope_theta": 1}}, "rope_theta must be above 1"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}},
            "the keys of a token would depend on the length of its text",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "short_factor must be a list of 8",
        ),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 7}}, "long_factor must be a list of 8 numbers"),
        ({"rope_scaling": LONG | {"short_factor": [0.0] * 8}}, "short_factor must be a positive number"),
        ({"rope_scaling": LONG | {"short_factor": ["1"] * 8}}, "short_factor must be a positive number"),
        ({"rope_scaling": LONG | {"attention_factor": -1}}, "attention_factor must be a positive number"),
        ({"rope_scaling": LONG | {"short_mscale": 1.2}}, "short_mscale is not supported"),
        ({"rope_scaling": LONG | {"long_mscale": 1.2}}, "long_mscale is not supported"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "alpha is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "that differ between layers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_attention_heads": 3}, "hidden_size 64 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of 3"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"torch_dtype": "float64"}, "dtype 'float64'"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id '</s>'"),
        ({"eos_token_id": True}, "eos_token_id True"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types contradicts"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4},
            "layer_types contradicts",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "layer_types contradicts",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_by_file_and_field(tmp_path, fields, named):
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, **fields)
    assert str(tmp_path / "config.json") in str(error.value)
    assert named in str(error.value)


def test_dynamic_scaling_changes_nothing_in_texts_of_up_to_max_position_embeddings(tmp_path):
    dynamic = read(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert dynamic == read(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_factor": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 1.0},
        {"factor": 1.0},
        {"original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_yarns_amplitude_is_that_of_transformers(tmp_path, fields):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    (rope,) = set(read(tmp_path, rope_scaling=YARN | {"rope_type": "yarn"} | fields).ropes)
    reference = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    assert rope.amplitude == pytest.approx(reference.attention_scaling)
    torch.testing.assert_close(inverse_frequencies(rope, 16), reference.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": YARN}, 512),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 512}}, 2048),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 384}}, 1536),
        ({"rope_scaling": YARN | {"factor": 2.5}, "original_max_position_embeddings": 100}, 250),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "llama3"} | LLAMA3_SCALING}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 512),
    ],
    ids=str,
)
def test_yarn_stretches_the_context_from_the_original_length(tmp_path, fields, expected):
    assert read(tmp_path, **fields).max_position_embeddings == expected


def test_yarn_of_some_layers_stretches_the_context(tmp_path):
    full = {"full_attention": YARN | {"rope_type": "yarn", "original_max_position_embeddings": 512}}
    fields = {"sliding_window": 5, "rope_parameters": full | {"sliding_attention": {"rope_type": "default"}}}
    assert read(tmp_path, "Olmo3ForCausalLM", **fields).max_position_embeddings == 2048


def test_phi3s_earliest_names_of_longrope_are_understood(tmp_path):
    expected = read(tmp_path, "Phi3ForCausalLM", rope_scaling=LONG)
    assert expected.ropes[0].scaling == "longrope"
    for name in ("su", "yarn"):
        assert read(tmp_path, "Phi3ForCausalLM", rope_scaling=LONG | {"type": name}) == expected


PHI3 = {"architectures": ["Phi3ForCausalLM"]}
GRANITE = {"architectures": ["GraniteForCausalLM"]}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**PHI3, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**PHI3, "partial_rotary_factor": 0.2}, "partial_rotary_factor must give an even number"),
        ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor must be from"),
        ({**PHI3, "partial_rotary_factor": 0.5, "rope_scaling": LONG}, "short_factor must be a list of 4"),
        ({**PHI3, "rope_scaling": LONG | {"original_max_position_embeddings": 64}}, "must be next to the"),
        ({**PHI3, "layer_types": ["sliding_attention"] * 4}, "layer_types contradicts"),
        ({**GRANITE, "residual_multiplier": 0}, "residual_multiplier must be a positive number"),
        ({**GRANITE, "attention_multiplier": -1.0}, "attention_multiplier must be a positive number"),
        ({**GRANITE, "logits_scaling": "8"}, "logits_scaling must be a positive number"),
        ({**GRANITE, "embedding_multiplier": 1e12}, "embedding_multiplier must be from"),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, "no_rope_layers must be a list"),
        ({**SMOLLM3, "no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must be a list"),
        ({**SMOLLM3, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive integer"),
        ({**SMOLLM3, "layer_types": ["sliding_attention"] * 4}, "layer_types contradicts"),
        ({**SMOLLM3, "partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({**SMOLLM3, "final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({**GEMMA2, "hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({**GEMMA2, "attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number"),
        ({**GEMMA2, "final_logit_softcapping": "30"}, "final_logit_softcapping must be a positive number"),
        ({**GEMMA2, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive integer"),
        ({**GEMMA2, "sliding_window": None}, "sliding_window is missing"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (
            {**GEMMA2, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters that differ",
        ),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        (
            {**GEMMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "must be full_attention",
        ),
        ({**GEMMA3, "rope_parameters": {"full_attention": {"rope_type": "llama3"}}}, "rope_type 'llama3'"),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {"rope_type": "yarn", "truncate": False}}},
            "truncate false is not supported where layers differ",
        ),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"alpha": 2.0}}}, "alpha is not supported"),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear"}},
            "rope_scaling is not supported in addition to rope_parameters",
        ),
        ({"architectures": ["Phi3ForConditionalGeneration"]}, "only the text model, Phi3ForCausalLM"),
    ],
    ids=str,
)
def test_each_architecture_refuses_by_field_what_it_cannot_compute(tmp_path, fields, named):
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, **fields)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Phi3", {}),
        ("Phi3", {"sliding_window": 9, "partial_rotary_factor": 0.5, "rms_norm_eps": ...}),
        ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
        ("Phi3", {"rope_scaling": LONG | {"factor": 3.0}, "original_max_position_embeddings": 64}),
        ("Phi3", {"rope_scaling": LONG | {"original_max_position_embeddings": 4096}}),
        ("Phi3", {"rope_scaling": LONG | {"attention_factor": 1.5}, "original_max_position_embeddings": 64}),
        ("Granite", {"embedding_multiplier": 12, "residual_multiplier": 0.25, "logits_scaling": 8}),
        ("SmolLM3", {"num_key_value_heads": ...}),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 5}),
        ("SmolLM3", {"layer_types": ["full_attention", "sliding_attention"] * 2, "use_sliding_window": True,
                     "sliding_window": 5, "no_rope_layer_interval": 3}),
        ("Olmo2", {"rms_norm_eps": ..., "tie_word_embeddings": ...}),
    ],
    ids=str,
)  # fmt: skip
def test_further_architectures_mean_what_they_mean_to_transformers(tmp_path, architecture, fields):
    import transformers

    spec = read(tmp_path, f"{architecture}ForCausalLM", **fields)
    config = getattr(transformers, f"{architecture}Config").from_pretrained(tmp_path)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tied_embeddings == config.tie_word_embeddings
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(config, "sliding_window", None)
    assert spec.windows == tuple(window if kind == "sliding_attention" else None for kind in types)
    rotates = getattr(config, "no_rope_layers", None) or [1] * 4
    assert [rope is not None for rope in spec.ropes] == [value == 1 for value in rotates]
    (rope,) = {rope for rope in spec.ropes if rope}
    parameters = config.rope_parameters
    assert (rope.scaling, rope.theta) == (parameters["rope_type"], parameters["rope_theta"])
    assert spec.rotary_dim == int(16 * parameters.get("partial_rotary_factor", 1))
    assert spec.multipliers.attention == getattr(config, "attention_multiplier", 16**-0.5)
    assert spec.multipliers.embedding == getattr(config, "embedding_multiplier", 1)
    assert spec.multipliers.residual == getattr(config, "residual_multiplier", 1)
    assert spec.multipliers.logits == 1 / getattr(config, "logits_scaling", 1)


GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 1_000.0}


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (2, {}),
        (2, {"head_dim": ..., "query_pre_attn_scalar": 144, "sliding_window_pattern": 3}),
        (2, {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}),
        (2, {"attn_logit_softcapping": 20.0, "layer_types": ["full_attention"] * 4, "rope_theta": 5_000.0}),
        (3, {}),
        (3, {"sliding_window_pattern": 2, "query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0}),
        (3, {"rope_local_base_freq": 500.0, "rope_theta": 2e6, "sliding_window_pattern": 3}),
        (3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3}),
        (3, {"rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
             "layer_types": ["sliding_attention", "full_attention"] * 2}),
        (3, {"rope_parameters": {"full_attention": GLOBAL}, "rope_local_base_freq": 500.0,
             "sliding_window_pattern": 4}),
    ],
    ids=str,
)  # fmt: skip
def test_gemma_means_what_it_means_to_transformers(tmp_path, version, fields):
    import transformers

    fields = {"head_dim": 16, "rms_norm_eps": ..., "sliding_window": 5} | fields
    spec = read(tmp_path, f"Gemma{version}ForCausalLM", **fields)
    config = (transformers.Gemma2Config, transformers.Gemma3TextConfig)[version - 2].from_pretrained(tmp_path)
    assert (spec.head_dim, spec.num_kv_heads) == (config.head_dim, config.num_key_value_heads)
    assert (spec.rms_norm_eps, spec.tied_embeddings) == (config.rms_norm_eps, config.tie_word_embeddings)
    assert spec.multipliers.attention == config.query_pre_attn_scalar**-0.5
    assert spec.multipliers.embedding == config.hidden_size**0.5
    assert (spec.attention_cap or None) == config.attn_logit_softcapping
    assert (spec.logits_cap or None) == config.final_logit_softcapping
    assert spec.windows == tuple(5 if kind == "sliding_attention" else None for kind in config.layer_types)
    for kind, rope in zip(config.layer_types, spec.ropes, strict=True):
        parameters = config.rope_parameters if version == 2 else config.rope_parameters[kind]
        expected = parameters["rope_type"], parameters["rope_theta"], parameters.get("factor", 1.0)
        assert (rope.scaling, rope.theta, rope.factor) == expected


def test_layer_types_that_say_the_same_are_welcome(tmp_path):
    plain = read(tmp_path)
    assert read(tmp_path, layer_types=["full_attention"] * 4) == replace(plain)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(tmp_path)
