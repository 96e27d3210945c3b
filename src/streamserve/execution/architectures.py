"""The supported architectures: as data, the points in which each differs from Llama."""

from dataclasses import dataclass, replace
from typing import Literal

Windows = Literal[
    "none", "every layer", "some layers", "unrotated layers", "every layer if used", "some of every second",
    "every second", "all but fourth", "pattern",
]  # fmt: skip
"""Layers that may have a sliding window:

- none, or every layer
- where `use_sliding_window` is set: those from `max_window_layers` on, those without rotary embedding, every
  layer, or the first of every two below `max_window_layers`
- the first of every two, the first three of every four, or all but the last of every `sliding_window_pattern`

Except for the first two, `layer_types` decides if given."""

Norms = Literal["before", "after", "around"]
"""Where RMSNorm is applied: to what goes into attention and MLP, to what comes out of them, or to both."""

Activation = Literal["silu", "gelu_pytorch_tanh"]

QKNorm = Literal["none", "heads", "joint"]
"""RMSNorm of queries and keys: of each head, or of all heads of a token as one vector."""


@dataclass(frozen=True)
class ExpertTensors:
    """What checkpoints call the tensors of a mixture of experts: in a layer all begin with `prefix`, then
    comes `router`, or `experts`, a number, and `gate_up` or `down`. `stacked`: those of all experts are one
    tensor without the number, each expert's turned, its gates and values alternating."""

    prefix: str = "mlp"
    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    stacked: bool = False


@dataclass(frozen=True)
class Mixture:
    """How an architecture has a mixture of experts, for experts.Experts. `size_field` is the config's size of
    an expert. `normalized`: weights of the chosen experts sum to 1 (None: `norm_topk_prob` decides).
    `optional`: the config may say which layers have experts."""

    tensors: ExpertTensors = ExpertTensors()
    size_field: str = "moe_intermediate_size"
    normalized: bool | None = None
    shared: bool = False
    biased: bool = False
    optional: bool = True


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs from Llama. None for a bias: the config's `attention_bias` or `mlp_bias`
    decides.

    `norm_offset` is added to the weights of norms. `wide_norms`: norms are computed in float32 to the end,
    also the product with their weight. `activation_field` names the MLP's `activation` in configs. `fused`:
    q, k and v are one matrix in a checkpoint, and gate and up another. `partial_rotary`: a config may rotate
    part of each head. `longrope_names`: what else its configs call longrope. `skips_rotary`: the config may
    list layers without rotary embedding. `needs_rope`: its configs must say how that is scaled.
    `multipliers`: the config has Granite's multipliers of embeddings, residuals, attention scores and logits.
    `scaled_embedding`: embeddings are multiplied by √hidden_size, as rounded to the data type. `mixture`: the
    MLP of some layers is a mixture of experts. `clamped`: gates and values are bounded before they are
    multiplied. `sinks`: the softmax of attention has one more score, without a value, for each head.

    The others are the values where a config leaves a field out: `kv_heads`, `head_dim` and `window` (None: as
    many as heads, hidden_size / heads, no window), `theta`, `epsilon`, `tied` embeddings, and
    `original_positions`: original_max_position_embeddings next to the rope parameters (None: in them),
    `local_theta`: the base wavelength in layers with a window (None: `theta`), `query_scalar`: whose inverse
    root multiplies attention scores (None: head_dim), `attention_cap` and `logits_cap`: soft caps of scores
    and logits (0: none; None: there is no such field), `eos_token_id`: the token that ends a text (None:
    none).
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: QKNorm = "none"
    norms: Norms = "before"
    norm_offset: float = 0.0
    wide_norms: bool = False
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    windows: Windows = "none"
    fused: bool = False
    partial_rotary: bool = False
    longrope_names: tuple[str, ...] = ()
    skips_rotary: bool = False
    needs_rope: bool = False
    multipliers: bool = False
    scaled_embedding: bool = False
    mixture: Mixture | None = None
    clamped: bool = False
    sinks: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    theta: float = 10_000.0
    epsilon: float = 1e-6
    tied: bool = False
    original_positions: int | None = None
    local_theta: float | None = None
    query_scalar: int | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    eos_token_id: int | None = None


OLMO = Architecture(
    mlp_bias=False, qk_norm="joint", norms="after", wide_norms=True, epsilon=1e-5, eos_token_id=50_279
)
"""What OLMo 2 and 3 share."""

GEMMA = Architecture(
    mlp_bias=False, norms="around", norm_offset=1.0, wide_norms=True, activation="gelu_pytorch_tanh",
    activation_field="hidden_activation", scaled_embedding=True, kv_heads=4, head_dim=256, window=4096,
    tied=True, query_scalar=256, eos_token_id=1,
)  # fmt: skip
"""What Gemma 2 and 3 share."""

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(eos_token_id=2),
    "MistralForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", kv_heads=8, window=4096,
        eos_token_id=2,
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="some layers", kv_heads=32, window=4096
    ),
    "Qwen3ForCausalLM": Architecture(
        mlp_bias=False, qk_norm="heads", windows="some layers", kv_heads=32, head_dim=128, window=4096
    ),
    "Qwen2MoeForCausalLM": Architecture(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="some of every second", kv_heads=16,
        window=4096, mixture=Mixture(shared=True),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        mlp_bias=False, qk_norm="heads", windows="every layer if used", kv_heads=4, window=4096,
        mixture=Mixture(),
    ),
    "MixtralForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", kv_heads=8,
        theta=1_000_000.0, epsilon=1e-5, eos_token_id=2, mixture=Mixture(
            ExpertTensors("block_sparse_moe", gate_up=("w1", "w3"), down="w2"), "intermediate_size",
            normalized=True, optional=False,
        ),
    ),
    "GptOssForCausalLM": Architecture(
        qkv_bias=True, out_bias=True, mlp_bias=False, windows="every second", window=128, wide_norms=True,
        needs_rope=True, kv_heads=8, head_dim=64, theta=150_000.0, epsilon=1e-5, clamped=True, sinks=True,
        mixture=Mixture(
            ExpertTensors(router="router", gate_up=("gate_up_proj",), stacked=True), "intermediate_size",
            normalized=True, biased=True, optional=False,
        ),
    ),
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", fused=True,
        partial_rotary=True, longrope_names=("su", "yarn"), epsilon=1e-5, original_positions=4096,
        eos_token_id=32_000,
    ),
    "GraniteForCausalLM": Architecture(multipliers=True, eos_token_id=2),
    "SmolLM3ForCausalLM": Architecture(
        windows="unrotated layers", skips_rotary=True, kv_heads=4, theta=2_000_000.0, tied=True,
        eos_token_id=128_001,
    ),
    "Olmo2ForCausalLM": OLMO,
    "Olmo3ForCausalLM": replace(
        OLMO, windows="all but fourth", window=4096, theta=500_000.0, local_theta=500_000.0
    ),
    "Gemma2ForCausalLM": replace(GEMMA, windows="every second", attention_cap=50.0, logits_cap=30.0),
    "Gemma3ForCausalLM": replace(
        GEMMA, windows="pattern", qk_norm="heads", theta=1_000_000.0, local_theta=10_000.0, logits_cap=0.0
    ),
}  # fmt: skip
