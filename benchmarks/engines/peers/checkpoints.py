"""Random Llama checkpoints in bf16 with a tokenizer that every peer interprets identically."""

import json
import math
import os
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

VOCABULARY = 32_000
END = 0
"""The id that ends a text. Its embedding is zero, so that no greedy text ever contains it."""

WORDS = range(1 + 256 + 26 + 26**2, 1 + 256 + 26 + 26**2 + 26**3)
"""Ids of three-letter words with a leading space: the text of any sequence of them encodes to that
sequence."""


@dataclass(frozen=True)
class Model:
    """A shape of the Llama architecture; embeddings are tied, the head size is `hidden / heads`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int = 8192

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of all layers."""
        narrow = self.hidden * self.kv_heads // self.heads
        return self.layers * self.hidden * (2 * self.hidden + 2 * narrow + 3 * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Parameters of the tied embedding."""
        return VOCABULARY * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return 4 * self.layers * self.hidden * self.kv_heads // self.heads


MODELS = {
    "345m": Model(hidden=960, layers=32, heads=15, kv_heads=5, ffn=2560),
    "1b": Model(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192),
    "3b": Model(hidden=3072, layers=28, heads=24, kv_heads=8, ffn=8192),
}


def ensure(model: Model, folder: Path) -> Path:
    """Return the checkpoint of `model` in `folder`, written unless it exists."""
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_weights(model, folder)
        write_tokenizer(folder, model.context)
    return folder


def text(ids: list[int]) -> str:
    """Return the text that encodes to `ids`, all of WORDS."""
    letters = [divmod(i - WORDS.start, 26) for i in ids]
    a = ascii_lowercase
    return "".join(f" {a[high // 26]}{a[high % 26]}{a[low]}" for high, low in letters)


def _write_weights(model: Model, folder: Path) -> None:
    """Write weights scaled so that logits have the spread of a trained model's."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    llama.to_empty(device="cpu")
    llama.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if parameter.ndim == 2:
                gain = 3.0 if "embed" in name else 1.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (gain / math.sqrt(parameter.shape[1])))
            else:
                parameter.fill_(1.0)
        llama.get_input_embeddings().weight[END] = 0
    llama.save_pretrained(folder)


def write_tokenizer(folder: Path, context: int) -> None:
    """Write to the folder a byte-level BPE tokenizer whose merges all start at a space and grow by a letter,
    so that no two
    compete."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet]
    merges = []
    words = ("Ġ" + "".join(word) for size in range(1, 5) for word in product(ascii_lowercase, repeat=size))
    for word in islice(words, VOCABULARY - len(tokens)):
        merges.append((word[:-1], word[-1]))
        tokens.append(word)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "bos_token": None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    written = folder / "tokenizer_config.json.part"
    written.write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(written, folder / "tokenizer_config.json")  # last and atomic: marks the checkpoint complete
