"""A checkpoint of finite weights whose activations overflow after one particular token."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint

TOKEN = 317
"""The token after which hidden states, keys and values are NaN or infinite."""

_SIGNAL = 63
"""The hidden dimension that is zero for all tokens but TOKEN."""


def make_overflowing(folder: Path, dtype: str = "float32", layer: int = 1) -> Path:
    """Write a random llama that computes finite values unless TOKEN is among the tokens, and return its
    folder.

    The MLP of `layer` multiplies a value of TOKEN by 1e20 twice, beyond the range of float32 and bfloat16.
    Nothing else writes to that dimension, and TOKEN is never the likeliest next token.
    """
    make_checkpoint(folder, "llama", dtype)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[_SIGNAL, :] = 0
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[:, _SIGNAL] = 0
    embedding[TOKEN, :], embedding[TOKEN, _SIGNAL] = 0, 1
    head[TOKEN] = 0
    for name in ("gate_proj", "up_proj"):
        weight = tensors[f"model.layers.{layer}.mlp.{name}.weight"]
        weight[0, :], weight[0, _SIGNAL] = 0, 1e20
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
