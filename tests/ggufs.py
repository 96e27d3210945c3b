"""GGUF files of small random models, written by the package `gguf`, the reference for the format."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from streamserve.execution.formats.checkpoint import SINGLE, plain_name
from streamserve.execution.formats.gguf.blocks import FORMATS
from streamserve.execution.model.text_part import OTHER_PARTS
from tests.checkpoints import CHAT_TEMPLATE

Type = gguf.GGMLQuantizationType
Floats = NDArray[np.float32]

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps", "block_sparse_moe.experts.w2": "ffn_down_exps",
}  # fmt: skip

AROUND = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OWN_NAMES = {
    "gemma2": AROUND, "gemma3": AROUND, "olmo2": AROUND,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}  # fmt: skip
"""Names of a layer's tensors that only a single architecture uses."""

FAMILIES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3", "olmo3": "olmo2", "gpt_oss": "gpt-oss",
    "ministral3": "mistral3", "glm4_moe": "glm4moe", "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe",
}  # fmt: skip
EXPERT = re.compile(r"\.experts\.(\d+)\.")
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight", "router.weight")
PERMUTED = ("llama", "mistral", "ministral3", "mixtral", "granite", "smollm3")

SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "IQ4_XS": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
"""Offsets of the float16 numbers in a block."""


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random blocks [rows, bytes of a row]. Their scales are such that the weights have the size of a
    random model's."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[Type[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // numbers, nbytes), np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(rows, -1)

    variation = rng.uniform(0.5, 1.0, blocks.shape[:2])

    def scaled(*factors: float) -> NDArray[np.uint8]:
        """Set the scale and the factor of the minimums in each block."""
        for at, factor in zip(SCALES[name], factors, strict=False):
            blocks[..., at : at + 2] = (variation * factor).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(rows, -1)

    plain, least = (dequantize(scaled(*factors), Type[name]) for factors in ((1.0, 0.0), (0.0, 1.0)))
    minimum = -plain.mean() / least.mean() if len(SCALES[name]) > 1 else 0.0
    by = 1.0 / (dequantize(scaled(1.0, minimum), Type[name]).std() * columns**0.5)
    return scaled(by, by * minimum)


def stored_name(name: str, family: str) -> str:
    """Return a tensor's name in a GGUF file of an architecture."""
    if name.endswith("self_attn.sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    if name.endswith("e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    module, kind = name.rsplit(".", 1)
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(NAMES | OWN_NAMES.get(family, {}))[part]}.{kind}"


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return rows in the order in which llama.cpp's converter stores queries and keys: rotated pairs are
    adjacent."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    source: Path,
    target: Path,
    types: Callable[[str], str] | str = "F32",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Write the checkpoint of `source` to the file `target`, each matrix in the type that `types` gives its
    name in the folder. Return the tensors, in float32 and by these names, that the package reads from it.
    `change` adds entries; `options` are the writer's."""
    config = json.loads((source / "config.json").read_text())
    config = config.get("text_config", config)
    family = FAMILIES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, family, **options)
    write_entries(writer, config)
    write_own_entries(writer, config)
    write_tokenizer(writer, source)
    change(writer)
    named = {plain_name(name): tensor for name, tensor in load_file(source / SINGLE).items()}
    stored = {name: tensor for name, tensor in named.items() if not name.startswith(OTHER_PARTS)}
    write_mxfp4(writer, stored)
    tensors = {name: tensor.float().numpy() for name, tensor in stored.items()}
    if family in ("gpt-oss", "qwen3vlmoe"):
        tensors = unstacked(tensors, alternating=family == "gpt-oss")
    read = dict[str, torch.Tensor]()
    for seed, (name, tensor) in enumerate(stacked(tensors).items()):
        is_matrix = tensor.ndim >= 2 and not name.endswith((*ROUTERS, "bias"))
        kind = (types if isinstance(types, str) else types(name)) if is_matrix else "F32"
        heads = heads_of(config, name)
        offset = np.float32(family.startswith("gemma") and name.endswith("norm.weight"))
        data = stored_tensor((permuted(tensor, heads) if heads else tensor) + offset, kind, seed)
        writer.add_tensor(stored_name(name, family), data, raw_dtype=Type[kind])
        floats = tensor_floats(data, kind) - offset
        if ".experts." in name:
            for number, floats_of_one in enumerate(floats):
                one = name.replace(".experts.", f".experts.{number}.")
                read[one] = torch.from_numpy(floats_of_one.copy())
            continue
        if name.endswith("shared_expert_gate.weight"):
            floats = floats[None]
        read[name] = torch.from_numpy(unpermuted(floats, heads).copy() if heads else floats.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def write_own_entries(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the entries that only some architectures have."""
    family, rope = config["model_type"], config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if family in ("gemma2", "gemma3_text", "olmo3", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(name):
            add(config[name])
    if family == "phi3":
        write_longrope(writer, config)
    elif rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if family in ("qwen3_vl_text", "qwen3_vl_moe_text"):
        writer.add_num_deepstack_layers(1)
    if family == "glm4_moe":
        write_glm4_moe(writer, config)
    if family == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def write_glm4_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(
        int(config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"])
    )
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])


def write_longrope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope, original = config["rope_parameters"], config["original_max_position_embeddings"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_sliding_window(config["sliding_window"] or 0)
    if "long_factor" in rope:
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors((1 + math.log(scale) / math.log(original)) ** 0.5)
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def write_mxfp4(writer: gguf.GGUFWriter, tensors: dict[str, torch.Tensor]) -> None:
    """Write the experts of gpt-oss that are in MXFP4. In the folder the numbers of a block are consecutive;
    in the file they are first the lower halves of all bytes, then the upper halves."""
    for name in [name for name in tensors if name.endswith("_blocks")]:
        pairs = tensors.pop(name).numpy()
        scales = tensors.pop(name.replace("_blocks", "_scales")).numpy()
        numbers = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:3], 32)
        blocks = np.concatenate([scales[..., None], numbers[..., :16] | numbers[..., 16:] << 4], -1)
        rows = blocks.reshape(*blocks.shape[:2], -1)
        layer, halves = name.split(".")[2], {"down": rows}
        if "gate_up" in name:
            halves = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
        for half, own in halves.items():
            stored = np.ascontiguousarray(own)
            writer.add_tensor(f"blk.{layer}.ffn_{half}_exps.weight", stored, raw_dtype=Type.MXFP4)


def unstacked(tensors: dict[str, Floats], alternating: bool) -> dict[str, Floats]:
    """Return tensors with one tensor for each expert, and with gates and values separated. In the stacks they
    alternate and matrices are transposed; or all gates precede all values, as transformers writes them."""
    out = dict[str, Floats]()
    for name, tensor in tensors.items():
        prefix, found, part = name.partition(".experts.")
        if not found:
            out[name] = tensor
            continue
        kind = "bias" if part.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" or not alternating else tensor.swapaxes(1, 2)
        half_of = rows.shape[1] // 2
        gates, values = (
            (rows[:, ::2], rows[:, 1::2]) if alternating else (rows[:, :half_of], rows[:, half_of:])
        )
        halves = {"gate": gates, "up": values} if "gate_up" in part else {"down": rows}
        for half, values in halves.items():
            for number, own in enumerate(values):
                out[f"{prefix}.experts.{number}.{half}_proj.{kind}"] = np.ascontiguousarray(own)
    return out


def stacked(tensors: dict[str, Floats]) -> dict[str, Floats]:
    """Return tensors in which all experts share one tensor, and a shared expert's gate is a vector."""
    out = dict[str, Any]()
    for name, tensor in sorted(tensors.items(), key=lambda item: [int(n) for n in EXPERT.findall(item[0])]):
        if EXPERT.search(name):
            out.setdefault(EXPERT.sub(".experts.", name), []).append(tensor)
        else:
            out[name] = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
    return {name: np.stack(value) if isinstance(value, list) else value for name, value in out.items()}


def heads_of(config: dict[str, Any], name: str) -> int:
    """Return the number of heads of a tensor whose rows are permuted, else 0."""
    if config["model_type"] not in PERMUTED:
        return 0
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def stored_tensor(tensor: Floats, kind: str, seed: int) -> NDArray[Any]:
    if tensor.ndim == 3:
        rows = stored_tensor(tensor.reshape(-1, tensor.shape[-1]), kind, seed)
        return rows.reshape(*tensor.shape[:2], -1)
    if kind not in FORMATS:
        return quantize(tensor, Type[kind])
    try:
        return quantize(tensor, Type[kind])
    except NotImplementedError:
        return random_blocks(kind, *tensor.shape, seed)


def tensor_floats(stored: NDArray[Any], kind: str) -> Floats:
    return dequantize(stored, Type[kind]).astype(np.float32)


def write_entries(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the model's sizes, as llama.cpp's converter does."""
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next(filter(None, counts), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def write_tokenizer(writer: gguf.GGUFWriter, source: Path, pre: str = "gpt-2") -> None:
    """Add the byte-level tokenizer of a folder, if it has one."""
    if not (source / "tokenizer.json").exists():
        return
    content = json.loads((source / "tokenizer.json").read_text())
    vocabulary = dict(content["model"]["vocab"])
    added = {entry["content"]: entry for entry in content["added_tokens"]}
    vocabulary |= {text: entry["id"] for text, entry in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[text] for text in tokens] == list(range(len(tokens)))
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([
        kinds[added[text]["special"]] if text in added else gguf.TokenType.NORMAL for text in tokens
    ])  # fmt: skip
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    settings = json.loads((source / "tokenizer_config.json").read_text())
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(name):
            add(vocabulary[settings[name]])
    writer.add_chat_template(settings.get("chat_template") or CHAT_TEMPLATE)


def dequantized_folder(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a copy of the checkpoint of `source` with these tensors, in float32."""
    shutil.copytree(source, target)
    save_file(tensors, target / SINGLE, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    return target
