"""Map the names of tensors in Hugging Face layout, as the code uses them, to their names in GGUF files."""

EMBEDDING, FINAL_NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
ROPE_FREQUENCIES = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"

LINEAR_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS_NAMES = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
"""Prefixes of the names of experts' matrices, and of the shared expert's."""

POST_ATTENTION_NORM = "post_attention_layernorm"
_OTHERS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm",
    POST_ATTENTION_NORM: "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_PARAMETERS = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
"""A layer's tensors that are neither weight nor bias of a module."""

_MODEL = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": FINAL_NORM, "lm_head.weight": HEAD}


def layer_tensor(layer: int, name: str) -> str:
    """Return the name in GGUF files of a layer's tensor, such as blk.0.attn_q.weight."""
    return f"blk.{layer}.{name}"


def stored_name(name: str, post_norm: bool) -> str:
    """Return the name in GGUF files of a tensor such as model.layers.0.mlp.up_proj.weight. `post_norm`:
    whether the norm after attention is called post_attention_norm (families.Family)."""
    if name in _MODEL:
        return _MODEL[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    if rest in _PARAMETERS:
        return layer_tensor(int(layer), _PARAMETERS[rest])
    part, kind = rest.rsplit(".", 1)
    if post_norm and part == POST_ATTENTION_NORM:
        return layer_tensor(int(layer), f"post_attention_norm.{kind}")
    return layer_tensor(int(layer), f"{part_name(part)}.{kind}")


def part_name(part: str) -> str:
    """Return the name in GGUF files of a part of a layer, such as mlp.up_proj. The matrices of all experts
    are one tensor and have one name."""
    module, _, name = part.rpartition(".")
    if module in ("mlp.shared_expert", "mlp.shared_experts"):
        return f"{EXPERTS_NAMES[name]}_shexp"
    if module.startswith("mlp.experts."):
        return f"{EXPERTS_NAMES[name]}_exps"
    return (LINEAR_NAMES | _OTHERS)[part]


def expert_of(name: str) -> int | None:
    """Return the number of the expert to which the tensor `name` belongs; None if it belongs to none."""
    _, found, rest = name.partition(".mlp.experts.")
    return int(rest.split(".", 1)[0]) if found else None
