"""Tokenizer folders in Hugging Face layout, small enough to be made quickly."""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "the quick brown fox jumps over the lazy dog, and 1234 dogs don't mind",
    "Grüße aus Köln 你好世界 こんにちは مرحبا 🙂👩‍👩‍👧 e\u0301\u0302",
    "def add(first, second):\n    return first + second\n\n\n",
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_folder(folder: Path, **settings: Any) -> Path:
    """Return a byte-level BPE like those of Llama 3 and Qwen, which begins every text with `<|begin|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "日本"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    named = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    return _write(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", **named, **settings})


def sentencepiece_folder(folder: Path, **settings: Any) -> Path:
    """Return a BPE over characters with byte fallback, like those of Llama 2 and Mistral."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for character in "▁abcdefghijklmnopqrstuvwxyzHWäöü.,":
        vocabulary[character] = len(vocabulary)
    for pair in [
        "▁ ▁",
        "▁ h",
        "e l",
        "el l",
        "▁h ell",
        "▁hell o",
        "▁ w",
        "o r",
        "▁w or",
        "▁wor l",
        "▁worl d",
    ]:
        first, second = pair.split()
        merges.append((first, second))
        vocabulary[first + second] = len(vocabulary)
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return _write(folder, tokenizer, {"tokenizer_class": "LlamaTokenizerFast", **named, **settings})


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


MISTRAL_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[AUDIO]", "[BEGIN_AUDIO]", "[ARGS]",
    "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip


def tekken_folder(folder: Path, version: str = "v13") -> Path:
    """Return a folder with only a tekken.json: the bytes, some merges over them, and special tokens."""
    merges = [
        b"th",
        b"the",
        b" t",
        b" the",
        b"he",
        b"in",
        b"er",
        "ü".encode(),
        "🙂".encode()[:2],
        "🙂".encode()[:3],
    ]
    vocab = [bytes([byte]) for byte in range(256)] + merges + [b" " * 2, b"\n\n", b'{"']
    content = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": len(vocab) + 32,
            "default_num_special_tokens": 32,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(data).decode(), "token_str": None}
            for rank, data in enumerate(vocab)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(MISTRAL_SPECIAL)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder
