"""Small random checkpoints that embed or judge, and the results that transformers computes with them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM

from streamserve.execution.formats.checkpoint import SINGLE
from tests.checkpoints import make_checkpoint


def make_embedder(
    folder: Path, pooling: str = "lasttoken", architecture: str = "qwen3", **overrides: Any
) -> Path:
    """Write a base model with the files of sentence-transformers. Its tensors have no prefix, it has no
    output head, and the tokenizer appends a token."""
    make_checkpoint(folder, architecture, **{"head_dim": 16, **overrides})
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / SINGLE).items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    append_token(folder, "<|end|>")
    write_modules(folder, pooling)
    return folder


def append_token(folder: Path, token: str) -> None:
    """Let the tokenizer of a folder append a special token to each text."""
    from tokenizers.processors import TemplateProcessing

    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    ids = [(token, tokenizer.token_to_id(token))]
    tokenizer.post_processor = TemplateProcessing(single=f"$A {token}", special_tokens=ids)
    tokenizer.save(file)


def write_modules(folder: Path, pooling: str, normalize: bool = True) -> None:
    """Write the files that sentence-transformers reads."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds[: 2 + normalize])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    config = {"word_embedding_dimension": 64} | {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def make_judge(folder: Path) -> Path:
    """Write a causal model whose tokenizer has the tokens yes and no."""
    make_checkpoint(folder, "qwen3", head_dim=16, vocab_size=512, max_position_embeddings=2048)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens(["yes", "no"])
    assert tokenizer.get_vocab_size() <= 512
    tokenizer.save(file)
    return folder


@torch.no_grad()
def reference_embedding(folder: Path, ids: list[int], pooling: str = "lasttoken") -> torch.Tensor:
    """Return the embedding that transformers pools from a text, not normalized."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    hidden = model(torch.tensor([ids])).last_hidden_state[0]
    return hidden[-1] if pooling == "lasttoken" else hidden.mean(0)


@torch.no_grad()
def reference_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits after the last token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).logits[0, -1]
