"""Write a Llama checkpoint as a GGUF file with bit-identical weights."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(checkpoint: Path, path: Path) -> None:
    """Write the checkpoint, with tied embeddings and a byte-level BPE tokenizer, to `path`."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, config)
    add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config["eos_token_id"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safetensors' file is not a dict)
                _add_tensor(writer, name, tensors.get_tensor(name), heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], end: int) -> None:
    """Add a byte-level BPE tokenizer, the content of tokenizer.json."""
    vocabulary = tokenizer["model"]["vocab"]
    types = [gguf.TokenType.NORMAL] * len(vocabulary)
    types[end] = gguf.TokenType.CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, heads: dict[str, int]) -> None:
    """Add a tensor: norms in f32, matrices in bf16; rows of queries and keys that rotate together
    interleaved."""
    *_, part = name.removesuffix(".weight").split(".")
    if part in heads:
        rows, columns = tensor.shape
        tensor = tensor.reshape(heads[part], 2, rows // heads[part] // 2, columns)
        tensor = tensor.transpose(1, 2).reshape(rows, columns)
    if tensor.ndim == 1:
        writer.add_tensor(_name(name), tensor.float().numpy())
    else:
        raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm"}[name] + ".weight"
