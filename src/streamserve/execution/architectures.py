"""The supported architectures: as data, the points in which each differs from Llama."""

from dataclasses import dataclass
from typing import Literal

Windows = Literal["none", "every layer", "some layers", "unrotated layers"]
"""Layers that may have a sliding window: none, all, those from `max_window_layers` on where
`use_sliding_window` is set, or those without rotary embedding, likewise. `layer_types` decides in the last
two cases if given."""

Norms = Literal["before", "after"]
"""Where RMSNorm is applied: to what goes into attention and MLP, or to what comes out of them."""

QKNorm = Literal["none", "heads", "joint"]
"""RMSNorm of queries and keys: of each head, or of all heads of a token as one vector."""


@dataclass(frozen=True)
class Architecture:
    """How one architecture differs from Llama. None for a bias: the config's `attention_bias` or `mlp_bias`
    decides.

    `wide_norms`: norms are computed in float32 to the end, also the product with their weight. `fused`: q, k
    and v are one matrix in a checkpoint, and gate and up another. `partial_rotary`: the config may rotate a
    part of each head. `longrope_names`: what else its configs call longrope. `skips_rotary`: the config may
    list layers without rotary embedding. `multipliers`: the config has Granite's multipliers of embeddings,
    residuals, attention scores and logits.

    The others are the values where a config leaves a field out: `kv_heads`, `head_dim` and `window` (None: as
    many as heads, hidden_size / heads, no window), `theta`, `epsilon`, `tied` embeddings, and
    `original_positions`: original_max_position_embeddings next to the rope parameters (None: in them).
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: QKNorm = "none"
    norms: Norms = "before"
    wide_norms: bool = False
    windows: Windows = "none"
    fused: bool = False
    partial_rotary: bool = False
    longrope_names: tuple[str, ...] = ()
    skips_rotary: bool = False
    multipliers: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    theta: float = 10_000.0
    epsilon: float = 1e-6
    tied: bool = False
    original_positions: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", kv_heads=8, window=4096
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="some layers", kv_heads=32, window=4096
    ),
    "Qwen3ForCausalLM": Architecture(
        mlp_bias=False, qk_norm="heads", windows="some layers", kv_heads=32, head_dim=128, window=4096
    ),
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="every layer", fused=True,
        partial_rotary=True, longrope_names=("su", "yarn"), epsilon=1e-5, original_positions=4096,
    ),
    "GraniteForCausalLM": Architecture(multipliers=True),
    "SmolLM3ForCausalLM": Architecture(
        windows="unrotated layers", skips_rotary=True, kv_heads=4, theta=2_000_000.0, tied=True
    ),
    "Olmo2ForCausalLM": Architecture(
        mlp_bias=False, qk_norm="joint", norms="after", wide_norms=True, epsilon=1e-5
    ),
}  # fmt: skip
