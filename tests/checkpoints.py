"""Small random checkpoints in Hugging Face layout, made with transformers, so that tests need no download."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.artifact_cache import make_once

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 3
"""The id of `<|im_end|>`, which ends a reply."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other one too",
    "a request has a prompt and a number of tokens, and the answer comes one token at a time",
    "def add(first, second):\n    return first + second\n",
)

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}


def make_checkpoint(
    folder: Path,
    architecture: str = "llama",
    dtype: str = "float32",
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random model of `architecture`, as transformers names its model type ("llama", "qwen2", …), to
    `folder`; return it.

    `overrides` are fields of the architecture's config. Weights are scaled so that logits spread like a
    trained model's, and biases and norm weights are random too. With a vocabulary of 300 tokens or more the
    folder also holds a byte-level tokenizer with a chat template. Equal arguments are made once (see
    artifact_cache.py); the files in `folder` are copies, which a test may change.
    """
    fields = deepcopy({**_SIZES, **overrides})  # transformers writes into the rope parameters it is given

    def make(made: Path) -> None:
        _make_model(made, architecture, dtype, seed, max_shard_size, fields)

    make_once(Path(folder), Path(__file__), [architecture, dtype, seed, max_shard_size, fields], make)
    return Path(folder)


VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "image_size": 28, "patch_size": 14},
    "mistral3": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    "qwen2_5_vl": {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
                   "out_hidden_size": _SIZES["hidden_size"], "fullatt_block_indexes": [0]},
    "qwen3_vl": {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
                 "out_hidden_size": _SIZES["hidden_size"], "num_position_embeddings": 16,
                 "deepstack_visual_indexes": [0]},
}  # fmt: skip
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
"""The config of a small vision tower, by multimodal architecture. Its text part has the given fields."""


def _config(architecture: str, fields: dict[str, Any]) -> Any:
    """Return the config of an architecture whose text model has `fields`."""
    from transformers import AutoConfig

    vision = VISION.get(architecture)
    if vision is None:
        return AutoConfig.for_model(architecture, **fields)
    text = {"model_type": "mistral"} | fields if architecture == "mistral3" else fields
    outer = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
    return AutoConfig.for_model(architecture, text_config=text, vision_config=vision, **outer)


def model_class(architecture: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if architecture in VISION else AutoModelForCausalLM


def _make_model(
    folder: Path, architecture: str, dtype: str, seed: int, max_shard_size: str, fields: dict[str, Any]
) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = _config(architecture, fields)
    model = model_class(architecture).from_config(config, dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if fields["vocab_size"] >= 300:
        _write_tokenizer(folder, fields["vocab_size"])


def reference_model(folder: Path, dtype: str = "float32") -> Any:
    """Return the checkpoint as a transformers model, the reference for exactness."""
    architecture = json.loads((folder / "config.json").read_bytes())["model_type"]
    return model_class(architecture).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            gain = 3.0 if "embed" in name or "lm_head" in name else 1.0
            parameter.copy_(noise * gain / math.sqrt(parameter.shape[1]))
        else:
            parameter.copy_(noise * 0.1 + (1.0 if "norm" in name else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
