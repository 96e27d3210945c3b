"""Writing a trained model as a Hugging Face folder that any Llama loader reads."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import Llama, Shape
from .tokenizer import BOS, CHAT_TEMPLATE, EOS, IM_END, PAD, settings


def config(shape: Shape) -> dict[str, object]:
    """``config.json``, with both the older and the newer spelling of the type and the rotary base."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def tensors(model: Llama) -> dict[str, torch.Tensor]:
    """The weights under their Hugging Face names; the tied head is not stored twice."""
    return {
        f"model.{name}": weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }


def restore(model: Llama, folder: Path) -> None:
    """Load the weights of an exported folder, to train on from them."""
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in stored.items()})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: Llama, tokenizer_path: Path, folder: Path) -> None:
    """Write the folder's files, each by a rename, so that a reader never meets half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        fresh = Path(name)
        save_file(tensors(model), fresh / "model.safetensors", metadata={"format": "pt"})
        _write_json(fresh / "config.json", config(model.shape))
        generation = {
            "bos_token_id": BOS,
            "eos_token_id": [IM_END, EOS],
            "pad_token_id": PAD,
            "do_sample": False,
        }
        _write_json(fresh / "generation_config.json", generation)
        shutil.copyfile(tokenizer_path, fresh / "tokenizer.json")
        (fresh / "tokenizer_config.json").write_text(settings(model.shape.max_positions), encoding="utf-8")
        (fresh / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        for path in sorted(fresh.iterdir()):
            path.chmod(0o644)  # safetensors writes files that only their owner may read
            path.replace(folder / path.name)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    print(
        f"exported {sum(p.numel() for p in model.parameters()):,} parameters, {size:.2f} MB, to {folder}",
        flush=True,
    )
