"""The text part of a multimodal checkpoint, which is served as a text model.

Its config is the nested `text_config`, and its class has another name than the text model's. Tensors of the
other parts, such as a vision tower, are not loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamserve.execution.model.architectures import (
    ARCHITECTURES,
    Architecture,
    ExpertTensors,
    Mixture,
    Windows,
)
from streamserve.execution.model.fields import Fields, shown

OTHER_PARTS = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "visual.", "multi_modal_projector.")
)
"""Prefixes of tensors that are no part of the text model."""

_SHARED = ("eos_token_id", "quantization_config")
"""Fields of the text model that a config may have at the top instead of in `text_config`."""

_ROPES = ("rope_parameters", "rope_scaling")
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Rope parameters that distribute positions over time, height and width. All three are equal in a text, so
that the embedding is the plain one."""


@dataclass(frozen=True)
class TextPart:
    """The text part of a multimodal architecture: the `architectures` that compute it, by its model_type in
    configs, and the `defaults` of transformers' class for it that the architecture lacks. `mixture` replaces
    the architecture's mixture of experts, and `windows` its rule of sliding windows."""

    architectures: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mixture: Mixture | None = None
    windows: Windows | None = None


QWEN2_DEFAULTS = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80,
    "eos_token_id": 151_645,
}  # fmt: skip
"""The defaults of the text parts of Qwen2-VL and Qwen2.5-VL."""

TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart(
        {"gemma3_text": "Gemma3ForCausalLM"},
        {
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "max_position_embeddings": 131_072,
        },
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
    ),
    "Qwen2VLForConditionalGeneration": TextPart(
        dict.fromkeys(("qwen2_vl_text", "qwen2_vl"), "Qwen2ForCausalLM"), QWEN2_DEFAULTS
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl"), "Qwen2ForCausalLM"), QWEN2_DEFAULTS
    ),
    "Qwen3VLForConditionalGeneration": TextPart(
        {"qwen3_vl_text": "Qwen3ForCausalLM"}, {"rope_theta": 500_000.0}, windows="none"
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        {"num_key_value_heads": 16, "rope_theta": 500_000.0},
        Mixture(ExpertTensors(gate_up=("gate_up_proj",), stacked=True), normalized=True),
        windows="none",
    ),
}  # fmt: skip
"""The multimodal architectures whose text part is served."""


def text_fields(config: Fields, part: TextPart) -> tuple[Fields, str]:
    """Return the config of the text part, and its architecture. Configs of Qwen2-VL before transformers 4.52
    have its fields at the top. Raises CheckpointError for an unsupported text model."""
    nested = config.nested("text_config") or config
    model_type = nested.get("model_type")
    if not isinstance(model_type, str) or model_type not in part.architectures:
        supported = ", ".join(map(repr, part.architectures))
        nested.refuse("model_type", f"{shown(model_type)} is not supported (supported: {supported})")
    outer = {name: config.values[name] for name in _SHARED if name in config.values}
    values = {**part.defaults, **outer, **nested.values}
    if dtype := config.get("dtype") or config.get("torch_dtype"):  # of the whole model, as in transformers
        values["dtype"] = dtype
    values |= {name: _plain(values[name]) for name in _ROPES if name in values}
    return Fields(nested.name, values), part.architectures[model_type]


def text_family(config: Fields, part: TextPart, architecture: str) -> Architecture:
    """Return the properties of the text part's architecture. A quantized checkpoint has a tensor for each
    expert, as that of a text model has."""
    family, mixture = ARCHITECTURES[architecture], part.mixture
    if mixture and config.get("quantization_config") is not None:
        mixture = replace(mixture, tensors=ExpertTensors())
    return replace(family, mixture=mixture or family.mixture, windows=part.windows or family.windows)


def _plain(parameters: Any) -> Any:
    """Return rope parameters without those that only positions of images need."""
    if not isinstance(parameters, dict):
        return parameters
    plain = {name: value for name, value in parameters.items() if name not in _IMAGE_POSITIONS}
    kinds = {name: "default" for name in ("rope_type", "type") if plain.get(name) == "mrope"}
    return plain | kinds
