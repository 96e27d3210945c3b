"""The supported architectures, as data: the points in which each one differs from Llama."""

from dataclasses import dataclass, replace
from typing import Literal

Windows = Literal[
    "none", "every layer", "some layers", "unrotated layers", "every layer if used", "some of every second",
    "every second", "all but fourth", "pattern",
]  # fmt: skip
"""The rule by which layers have a sliding window:

- "none", "every layer": no layer, or all
- only if `use_sliding_window` is set: "some layers" from `max_window_layers` on, "unrotated layers" without
  rotary embedding, "every layer if used", or "some of every second": the first of every two layers below
  `max_window_layers`
- "every second": the first of every two layers; "all but fourth": the first three of every four; "pattern":
  all but the last of every `sliding_window_pattern`

Except with the first two rules, `layer_types` decides instead if the config has it."""

Norms = Literal["before", "after", "around"]
"""Where RMSNorm is applied: to the inputs of attention and MLP, to their outputs, or to both."""

Activation = Literal["silu", "gelu_pytorch_tanh"]

QKNorm = Literal["none", "heads", "joint"]
"""RMSNorm of queries and keys: none, of each head, or of all heads of a token as one vector."""


Shared = Literal["none", "gated", "counted"]
"""Shared experts: none; one, weighted by a gate; or `n_shared_experts` of the others' size in one MLP."""

SparseLayers = Literal["all", "listed", "after dense"]
"""The layers with experts: all, those that `decoder_sparse_step` and `mlp_only_layers` leave, or all after
`first_k_dense_replace` layers."""


@dataclass(frozen=True)
class ExpertTensors:
    """The names of a mixture's tensors in checkpoints, and their layout.

    * Within a layer the names are `prefix`.`router`, `prefix`.experts.NUMBER.`gate_up` or `down`, and
      `prefix`.`shared` for the shared expert.
    * `stacked`: the matrices of all experts are one tensor, named without the number. `transposed`: each
      matrix is transposed in it. `alternating`: gates and values alternate in it.
    """

    prefix: str = "mlp"
    router: str = "gate"
    shared: str = "shared_expert"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    stacked: bool = False
    transposed: bool = True
    alternating: bool = False


@dataclass(frozen=True)
class Mixture:
    """An architecture's mixture of experts (experts.Experts).

    * `count_fields`, `size_field`: the config's fields for the number of experts, and for an expert's size.
    * `layers`: which layers have experts.
    * `normalized`: whether the weights of the chosen experts sum to 1 (None: `norm_topk_prob` decides).
    * `sigmoid`: the router's scores are sigmoids, and a correction is added to them for the choice. Otherwise
      they are a softmax.
    * `shared`: the kind of shared expert. `biased`: whether router and experts have biases.
    """

    tensors: ExpertTensors = ExpertTensors()
    count_fields: tuple[str, ...] = ("num_experts", "num_local_experts")
    size_field: str = "moe_intermediate_size"
    layers: SparseLayers = "listed"
    normalized: bool | None = None
    sigmoid: bool = False
    shared: Shared = "none"
    biased: bool = False


@dataclass(frozen=True)
class Architecture:
    """The differences of one architecture from Llama.

    * `qkv_bias`, `out_bias`, `mlp_bias`: whether there are biases (None: the config's `attention_bias` or
      `mlp_bias` decides).
    * `norm_offset` is added to the weights of norms. `wide_norms`: the product with a norm's weight is
      computed in float32 too.
    * `activation_field`: the config's field for the MLP's `activation`.
    * `fused`: in checkpoints q, k and v are one matrix, and gate and up another.
    * `partial_rotary`: the default of the part of each head that is rotated (None: always the whole head).
      `longrope_names`: other names of longrope in configs. `skips_rotary`: configs may list layers without
      rotary embedding. `needs_rope`: configs must have scaling parameters of the rotary embedding.
      `scales_queries`: these may scale queries by position.
    * `multipliers`: configs have Granite's multipliers of embeddings, residuals, attention scores and logits.
      `scaled_embedding`: embeddings are multiplied by √hidden_size, rounded to the data type.
    * `optional_qk_norm`: configs have `qk_norm` only with `use_qk_norm`.
    * `mixture`: the MLP of some layers is a mixture of experts. `clamped`: gates and values are bounded
      before they are multiplied.
    * `predictors`: checkpoints may have `num_nextn_predict_layers` further layers (default 1), which predict
      more tokens.
    * `sinks`: for each head, the softmax of attention has one more score, which has no value.

    The other fields are defaults for configs without the field:

    * `kv_heads` (None: the number of heads), `head_dim` (None: hidden_size / heads), `window` (None: none),
      `theta`, `epsilon`, `tied` embeddings, `attention_bias`.
    * `original_positions`: the default of original_max_position_embeddings, which stands next to the rope
      parameters (None: among them).
    * `local_theta`: the base wavelength in layers with a window (None: `theta`).
    * `query_scalar`: its inverse square root multiplies attention scores (None: head_dim).
    * `attention_cap`, `logits_cap`: soft caps of scores and logits (0: none; None: there is no such field).
    * `eos_token_id`: the token that ends a text (None: none).
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: QKNorm = "none"
    optional_qk_norm: bool = False
    norms: Norms = "before"
    norm_offset: float = 0.0
    wide_norms: bool = False
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    windows: Windows = "none"
    fused: bool = False
    partial_rotary: float | None = None
    longrope_names: tuple[str, ...] = ()
    skips_rotary: bool = False
    needs_rope: bool = False
    scales_queries: bool = False
    multipliers: bool = False
    scaled_embedding: bool = False
    mixture: Mixture | None = None
    predictors: bool = False
    clamped: bool = False
    sinks: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    theta: float = 10_000.0
    epsilon: float = 1e-6
    tied: bool = False
    attention_bias: bool = False
    original_positions: int | None = None
    local_theta: float | None = None
    query_scalar: int | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    eos_token_id: int | None = None


OLMO = Architecture(
    mlp_bias=False, qk_norm="joint", norms="after", wide_norms=True, epsilon=1e-5, eos_token_id=50_279
)
"""The fields in which OLMo 2 and 3 differ from Llama alike."""

GEMMA = Architecture(
    mlp_bias=False, norms="around", norm_offset=1.0, wide_norms=True, activation="gelu_pytorch_tanh",
    activation_field="hidden_activation", scaled_embedding=True, kv_heads=4, head_dim=256, window=4096,
    tied=True, query_scalar=256, eos_token_id=1,
)  # fmt: skip
"""The fields in which Gemma 2 and 3 differ from Llama alike."""

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(eos_token_id=2),
    "MistralForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", kv_heads=8, window=4096,
        eos_token_id=2,
    ),
    "Ministral3ForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", needs_rope=True,
        scales_queries=True, kv_heads=8, head_dim=128, epsilon=1e-5, eos_token_id=2,
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="some layers", kv_heads=32, window=4096
    ),
    "Qwen3ForCausalLM": Architecture(
        mlp_bias=False, qk_norm="heads", windows="some layers", kv_heads=32, head_dim=128, window=4096
    ),
    "Qwen2MoeForCausalLM": Architecture(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="some of every second", kv_heads=16,
        window=4096, mixture=Mixture(shared="gated"),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        mlp_bias=False, qk_norm="heads", windows="every layer if used", kv_heads=4, window=4096,
        mixture=Mixture(),
    ),
    "MixtralForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", kv_heads=8,
        theta=1_000_000.0, epsilon=1e-5, eos_token_id=2, mixture=Mixture(
            ExpertTensors("block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
            size_field="intermediate_size", layers="all", normalized=True,
        ),
    ),
    "GptOssForCausalLM": Architecture(
        attention_bias=True, mlp_bias=False, windows="every second", window=128, wide_norms=True,
        needs_rope=True, kv_heads=8, head_dim=64, theta=150_000.0, epsilon=1e-5, clamped=True, sinks=True,
        mixture=Mixture(
            ExpertTensors(router="router", gate_up=("gate_up_proj",), stacked=True, alternating=True),
            size_field="intermediate_size", layers="all", normalized=True, biased=True,
        ),
    ),
    "Glm4MoeForCausalLM": Architecture(
        out_bias=False, mlp_bias=False, qk_norm="heads", optional_qk_norm=True, partial_rotary=0.5,
        kv_heads=8, epsilon=1e-5, predictors=True, mixture=Mixture(
            ExpertTensors(shared="shared_experts"), ("n_routed_experts",), layers="after dense", sigmoid=True,
            shared="counted",
        ),
    ),
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", fused=True,
        partial_rotary=1.0, longrope_names=("su", "yarn"), epsilon=1e-5, original_positions=4096,
        eos_token_id=32_000,
    ),
    "GraniteForCausalLM": Architecture(multipliers=True, eos_token_id=2),
    "SmolLM3ForCausalLM": Architecture(
        windows="unrotated layers", skips_rotary=True, kv_heads=4, theta=2_000_000.0, tied=True,
        eos_token_id=128_001,
    ),
    "OlmoeForCausalLM": Architecture(
        mlp_bias=False, qk_norm="joint", epsilon=1e-5, eos_token_id=50_279,
        mixture=Mixture(size_field="intermediate_size", layers="all"),
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
