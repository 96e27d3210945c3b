"""The architectures of GGUF files, as data: the points in which their files differ."""

from dataclasses import dataclass

from streamserve.execution.model.architectures import ExpertTensors
from streamserve.execution.model.experts import TENSORS

WINDOW, PATTERN, LOCAL_BASE = (
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
)  # fmt: skip
TEMPERATURE, YARN_LOGARITHM = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"

SECTIONS, DEEPSTACK = "rope.dimension_sections", "n_deepstack_layers"
DENSE, SHARED_COUNT, SCALE, GROUPS, CHOSEN_GROUPS, PREDICTORS = (
    "leading_dense_block_count", "expert_shared_count", "expert_weights_scale", "expert_group_count",
    "expert_group_used_count", "nextn_predict_layers",
)  # fmt: skip
SIGMOID_EXPERTS = frozenset({DENSE, SHARED_COUNT, SCALE, GROUPS, CHOSEN_GROUPS, PREDICTORS})


@dataclass(frozen=True)
class Family:
    """The properties of one architecture's files. Numbers are defaults for files without the entry.

    * `architecture`: its name in Hugging Face folders.
    * `permuted`: the file's rotary embedding pairs neighbours, so its rows of queries and keys are in another
      order than in Hugging Face layout.
    * `post_norm`: the norm after attention is called post_attention_norm, not ffn_norm.
    * `entries`: metadata that only this architecture has.
    * `period`: all layers except the last of every `period` layers have a sliding window of `window` tokens
      (0: all layers have one; None: windows are not supported).
    * `plain_local`: the rotary embedding of layers with a window is not scaled. `local_theta`: its base
      wavelength (None: as in the other layers).
    * `whole_yarn`: YaRN blends a range of whole dimensions.
    * `unrotated`: the last of every `unrotated` layers has no rotary embedding (0: all have one).
    * `normalized`: the weights of a token's experts are divided by their sum (None: experts are not
      supported).
    * `multimodal`: it is the text part of a model whose vision tower is in another file.
    * `predictors`: the last blocks may predict further tokens; the file has their number.
    * `optional_qk_norm`: there is a norm of queries and keys if the file has its tensors.
    * `expert_tensors`: the names of experts' tensors in Hugging Face layout.
    * `wide_layers`: a model with this number of layers scales queries by hidden_size / heads, which GGUF does
      not record.
    """

    architecture: str
    permuted: bool = False
    post_norm: bool = False
    entries: frozenset[str] = frozenset()
    period: int | None = None
    window: int = 0
    plain_local: bool = False
    local_theta: float | None = None
    whole_yarn: bool = True
    unrotated: int = 0
    normalized: bool | None = None
    multimodal: bool = False
    predictors: bool = False
    optional_qk_norm: bool = False
    expert_tensors: ExpertTensors = TENSORS
    wide_layers: int = 0


FAMILIES = {
    "llama": Family("LlamaForCausalLM", permuted=True, period=0, normalized=True),
    "mistral": Family("MistralForCausalLM", permuted=True, period=0),
    "mistral3": Family(
        "Ministral3ForCausalLM", permuted=True, entries=frozenset({TEMPERATURE, YARN_LOGARITHM})
    ),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2vl": Family("Qwen2ForCausalLM", multimodal=True, entries=frozenset({SECTIONS})),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3vl": Family("Qwen3ForCausalLM", multimodal=True, entries=frozenset({SECTIONS, DEEPSTACK})),
    "qwen2moe": Family("Qwen2MoeForCausalLM", normalized=False),
    "qwen3moe": Family("Qwen3MoeForCausalLM", normalized=True),
    "qwen3vlmoe": Family(
        "Qwen3MoeForCausalLM", normalized=True, multimodal=True, entries=frozenset({SECTIONS, DEEPSTACK})
    ),
    "glm4moe": Family(
        "Glm4MoeForCausalLM", post_norm=True, normalized=False, predictors=True, optional_qk_norm=True,
        expert_tensors=ExpertTensors(shared="shared_experts"), entries=SIGMOID_EXPERTS,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", post_norm=True, period=2, window=4096, wide_layers=46,
        entries=frozenset({PATTERN, LOCAL_BASE, "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", post_norm=True, period=6, plain_local=True, local_theta=10_000.0, wide_layers=62,
        entries=frozenset({PATTERN, LOCAL_BASE, "final_logit_softcapping"}),
    ),
    "phi3": Family("Phi3ForCausalLM", period=0, entries=frozenset({"rope.scaling.attn_factor"})),
    "granite": Family(
        "GraniteForCausalLM", permuted=True,
        entries=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    ),
    "smollm3": Family("SmolLM3ForCausalLM", permuted=True, unrotated=4),
    "olmoe": Family("OlmoeForCausalLM", normalized=False),
    "olmo2": Family(
        "Olmo2ForCausalLM", post_norm=True, period=4, plain_local=True,
        entries=frozenset({PATTERN, LOCAL_BASE}),
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM", post_norm=True, period=2, whole_yarn=False, normalized=True,
        entries=frozenset({PATTERN, LOCAL_BASE}), expert_tensors=ExpertTensors(router="router"),
    ),
}  # fmt: skip
"""The supported architectures, by their value of general.architecture."""
