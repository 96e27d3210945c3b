"""The architectures of GGUF files: as data, the points in which their files differ."""

from dataclasses import dataclass

from streamserve.execution.architectures import ExpertTensors
from streamserve.execution.experts import TENSORS

WINDOW, PATTERN, LOCAL_BASE = (
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How the files of one architecture are read.

    `architecture` is its name in Hugging Face folders. `permuted`: its rotary embedding pairs neighbours, so
    the rows of queries and keys are in another order than ours. `post_norm`: the norm that follows attention
    is called post_attention_norm, not ffn_norm. `entries` are metadata that only this architecture has.

    `period`: all layers but the last of every so many have a sliding window (0: all layers; None: none may),
    of `window` tokens where the file does not say it. `plain_local`: the rotary embedding of layers with a
    window is not scaled, and has the base wavelength `local_theta` (None: that of the others) where the file
    does not say it. `whole_yarn`: YaRN blends a range of whole dimensions. `unrotated`: the last of every so
    many layers has no rotary embedding (0: all have one).

    `normalized`: whether the weights of a token's experts are divided by their sum, where the file does not
    say it (None: it has no experts). `expert_tensors` are our names of experts' tensors. `wide_layers`: with
    so many layers a query's scale comes from hidden_size / heads, which no entry says.
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
    expert_tensors: ExpertTensors = TENSORS
    wide_layers: int = 0


FAMILIES = {
    "llama": Family("LlamaForCausalLM", permuted=True, period=0, normalized=True),
    "mistral": Family("MistralForCausalLM", permuted=True, period=0),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", normalized=False),
    "qwen3moe": Family("Qwen3MoeForCausalLM", normalized=True),
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
    "olmo2": Family(
        "Olmo2ForCausalLM", post_norm=True, period=4, plain_local=True,
        entries=frozenset({PATTERN, LOCAL_BASE}),
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM", post_norm=True, period=2, whole_yarn=False, normalized=True,
        entries=frozenset({PATTERN, LOCAL_BASE}), expert_tensors=ExpertTensors(router="router"),
    ),
}  # fmt: skip
"""By general.architecture."""
