"""Tokenizers from GGUF files give the ids and texts of the tokenizer that the file was made from."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from streamserve.protocol.errors import CheckpointError
from streamserve.text.chat import chat_template
from streamserve.text.reasoning import REASONING_FORMATS, find_reasoning_format
from streamserve.text.tokenizer import Tokenizer as Ours
from streamserve.text.tools.formats import FORMATS, find_format
from tests.conftest import Scale
from tests.text.folders import CHATML, CORPUS

BEGINNING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDING = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "llama-bpe": BEGINNING + r"\p{N}{1,3}" + ENDING,
    "qwen2": BEGINNING + r"\p{N}" + ENDING,
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PATTERNS |= dict.fromkeys(("dbrx", "glm4", "smaug-bpe"), PATTERNS["llama-bpe"])
"""Patterns as in the tokenizer.json of Llama 3, Qwen 2, Mistral Nemo, Phi-4-mini, Phi-4 and SmolLM3."""
WHOLE = ("llama-bpe", "tekken", "smaug-bpe")
"""The tokenizers that keep words which are tokens whole."""
BEGINS = ("llama-bpe", "tekken")
"""The tokenizers that begin texts with a token."""
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
WORDS = [
    "the", " the", "  ", " ", "\n", "\n\n", "\t", "quick", "brown's", "I'LL", "1", "1234", " 56", "Grüße",
    "e\u0301", "\u00e9", "你好", " مرحبا", "🙂", "👩‍👩‍👧", "<tool>", "<|im_end|>", "<|im_start|>", "▁", "...",
    "!?", "a_b", "\r\n", "\u2009", "don't", "def add(a, b):", "\x00", "日本", "hello world", "world", "aaaa",
    "HelloWORLD", "ÜBERder", "http://a/b//\n/",
]  # fmt: skip


def texts(scale: Scale) -> list[str]:
    rng = random.Random(scale.seed)
    made = ["".join(rng.choices(WORDS, k=rng.randint(0, 12))) for _ in range(scale.pick(150, 3000))]
    return [*made, "", " ", "a"]


def steps(pre: str) -> list[Any]:
    """Return the steps that published tokenizers of this name perform before merging."""
    if pre == "gpt-2":
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre in ("smollm", "refact"):
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def byte_level(pre: str) -> Tokenizer:
    """Return a trained byte-level tokenizer. The one for llama-bpe begins texts with a token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in WHOLE))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps(pre))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "日本"])
    if pre in BEGINS:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return tokenizer


def write(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Write a file that contains only a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    content = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = {entry["content"]: entry["special"] for entry in content["added_tokens"]}
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[added.get(text)] for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(3)
    writer.add_chat_template(CHATML)


@pytest.mark.parametrize(
    "pre",
    ["gpt-2", "llama-bpe", "qwen2", "smollm", "refact", "tekken", "gpt-4o", "dbrx", "glm4", "smaug-bpe"],
)
def test_byte_level_tokenizers_give_the_original_ids(tmp_path: Path, scale: Scale, pre: str) -> None:
    original = byte_level(pre)
    ours = Ours.from_folder(write(tmp_path / "a.gguf", lambda writer: add_byte_level(writer, original, pre)))
    assert ours.byte_level
    assert ours.vocab_size == original.get_vocab_size()
    begins = pre in BEGINS
    assert ours.added_special_tokens == ([0] if begins else [], [])
    for text in texts(scale):
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)
        plain = ours.encode(text, add_special_tokens=False)
        if pre != "qwen2" and not any(special in text for special in (*SPECIAL, "<tool>", "日本")):
            assert b"".join(map(ours.token_bytes, plain)) == text.encode()


def sentencepiece(prefix: bool = True) -> tuple[Tokenizer, list[str], list[float], list[int]]:
    """Return a BPE over characters like Llama 2's, with its pieces, scores and types as in a SentencePiece
    file."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    merged = [
        "▁t", "▁h", "he", "▁the", "ll", "el", "ell", "▁hell", "▁hello", "or", "wor", "▁w", "▁wor", "ld",
        "▁world", "wo", "▁▁", "▁▁▁▁", "aa", "aaa", "own", "br", "brown", "üß",
    ]  # fmt: skip
    characters = sorted(set("▁" + "".join(merged) + "Grüßeabcdxyz.,'"))
    pieces += merged + characters
    types += [1] * (len(merged) + len(characters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(characters))]
    pieces.append("<tool>")
    types.append(4)
    scores.append(-1000.0)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    normal = {piece for piece, kind in zip(pieces, types, strict=True) if kind == 1}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in merged
        for cut in reversed(range(1, len(piece)))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer, pieces, scores, types


def add_sentencepiece(
    writer: gguf.GGUFWriter,
    pieces: list[str],
    scores: list[float],
    types: list[int],
    unknown: int = 0,
    bos: int = 1,
    eos: int = 2,
) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(unknown)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_give_the_original_ids(tmp_path: Path, scale: Scale, prefix: bool) -> None:
    original, *lists = sentencepiece(prefix)

    def add(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, *lists)
        if not prefix:
            writer.add_add_space_prefix(False)

    ours = Ours.from_folder(write(tmp_path / "a.gguf", add))
    assert not ours.byte_level
    for text in texts(scale):
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)


def gemma() -> tuple[Tokenizer, list[str], list[float], list[int]]:
    """Return a BPE like the one in Gemma's tokenizer.json, with its pieces, scores and types as llama.cpp's
    converter writes them: user-defined pieces have spaces in place of SentencePiece's mark."""
    defined = ["\n", "\n\n", "▁▁▁▁", "▁▁▁", "▁▁", "<table>"]
    merged = [
        "▁t", "he", "▁the", "el", "lo", "hel", "hello", "▁w", "wor", "or", "\t\t", "▁a", "in", "aa",
        "\t\t\t\t",
    ]  # fmt: skip
    characters = sorted(set("▁Grüßeabcdxyz.,'<>") | set("".join(merged)) - {"\t"})
    names = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [*names, *defined, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters]
    types = [3] * 3 + [2] + [4] * len(defined) + [6] * 256 + [1] * (len(merged) + len(characters))
    scores = [0.0] * 4 + [-1000.0] * len(defined) + [0.0] * 256
    scores += [-float(i) for i in range(len(merged) + len(characters))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    vocabulary["\t"] = vocabulary.pop("<0x09>")
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ["▁▁▁▁", "▁▁▁", "▁▁", *merged]
        for cut in reversed(range(1, len(piece)))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(names)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in defined])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    for number in range(len(names), len(names) + len(defined)):
        pieces[number] = pieces[number].replace("▁", " ")
    return tokenizer, pieces, scores, types


def test_gemma_tokenizers_give_the_original_ids(tmp_path: Path, scale: Scale) -> None:
    original, pieces, scores, types = gemma()

    def add(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, pieces, scores, types, unknown=3, bos=2, eos=1)
        writer.add_add_space_prefix(False)

    ours = Ours.from_folder(write(tmp_path / "a.gguf", add))
    assert ours.vocab_size == original.get_vocab_size()
    merged = [text for text in texts(scale) if "▁" not in text]
    merged += ["a\t\tb", "    hello", "     the", "\n\n\n", "x  \n <table>\t\t\t\t\t", "  "]
    used = set[int]()
    for text in merged:
        ids = original.encode(text).ids
        used |= set(ids)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == original.decode(ids) == text
    assert {pieces.index(text) for text in ("  ", "    ", "\t\t", "\t\t\t\t", "\n\n", "<table>")} <= used


def by_scores(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """Merge the neighbours with the best score, the first of equals, until no merge is possible, as
    SentencePiece defines."""
    ids, symbols = {piece: number for number, piece in enumerate(pieces)}, list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [first + second for first, second in itertools.pairwise(symbols)]
        known = [(-scores[ids[pair]], at) for at, pair in enumerate(pairs) if pair in ids]
        if not known:
            return [ids[symbol] for symbol in symbols]
        _, at = min(known)
        symbols[at : at + 2] = [pairs[at]]


def test_the_pair_with_the_best_score_is_merged_first(tmp_path: Path, scale: Scale) -> None:
    _, pieces, scores, types = sentencepiece()
    path = write(tmp_path / "a.gguf", lambda writer: add_sentencepiece(writer, pieces, scores, types))
    ours, rng = Ours.from_folder(path), random.Random(scale.seed)
    assert ours.encode("hello world") == [1, pieces.index("▁hello"), pieces.index("▁world")]
    for _ in range(scale.pick(300, 5000)):
        text = "".join(rng.choices("hheelllloo wworrldd  tthaabGüß", k=rng.randint(1, 20)))
        assert ours.encode(text)[1:] == by_scores(text, pieces, scores), text


def test_special_tokens_and_the_chat_template_are_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", lambda writer: add_byte_level(writer, byte_level("qwen2"), "qwen2"))
    tokenizer = Ours.from_folder(path)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 3)
    assert [tokenizer.is_special(token) for token in (3, 360, 10)] == [True, False, False]
    template = chat_template(tokenizer.chat_template, tokenizer.special_tokens)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt)[0] == 2


def test_a_template_for_conversations_with_tools(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, byte_level("qwen2"), "qwen2")
        writer.kv_data[0].pop("tokenizer.chat_template")
        named = {"default": "plain", "tool_use": "<tool_call>{{ tools[0].function.name }}"}
        writer.add_chat_template([{"name": name, "template": text} for name, text in named.items()])

    tokenizer = Ours.from_folder(write(tmp_path / "a.gguf", add))
    renderer = tokenizer.renderer()
    assert renderer is not None
    chat = [{"role": "user", "content": "hi"}]
    assert renderer.render(chat) == "plain"
    tool = {"type": "function", "function": {"name": "f"}}
    assert renderer.render(chat, tools=[tool]) == "<tool_call>f"
    assert find_format("auto", tokenizer.template_signs) is FORMATS["hermes"]


@pytest.mark.parametrize(
    ("sign", "tools", "reasoning"),
    [
        ("<tool_call></think>", "hermes", "qwen3"),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("<|start_of_role|><|tool_call|><think></think><response>", "granite", "granite3_3"),
        ("<start_of_turn>", "gemma", None),
        ("<tool_call><function=x>", "qwen3_coder", None),
    ],
)
def test_the_formats_are_found_in_the_files_chat_template(
    tmp_path: Path, sign: str, tools: str, reasoning: str | None
) -> None:
    original = byte_level("gpt-2")
    original.add_special_tokens(
        [AddedToken(FORMATS[tools].marks[0] if FORMATS[tools].marks else "<x>", special=True)]
    )

    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, original, "gpt-2")
        writer.kv_data[0].pop("tokenizer.chat_template")
        writer.add_chat_template("{# " + sign + " #}{{ tools }}")

    tokenizer = Ours.from_folder(write(tmp_path / "a.gguf", add))
    assert find_format("auto", tokenizer.template_signs) is FORMATS[tools]
    found = find_reasoning_format("auto", tokenizer.template_signs)
    assert found is (REASONING_FORMATS[reasoning] if reasoning else None)
    for mark in FORMATS[tools].marks[:1]:
        assert tokenizer.special_id(mark) == original.token_to_id(mark)


def changed(entry: str, value: Any, kind: str = "gpt2") -> Callable[[gguf.GGUFWriter], None]:
    """Return a function that writes a good tokenizer with one entry set, or removed by None."""

    def add(writer: gguf.GGUFWriter) -> None:
        if kind == "gpt2":
            add_byte_level(writer, byte_level("gpt-2"), "gpt-2")
        else:
            add_sentencepiece(writer, *sentencepiece()[1:])
        for name in (f"tokenizer.ggml.{entry}", f"tokenizer.{entry}"):
            writer.kv_data[0].pop(name, None)
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{entry}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{entry}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{entry}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.ggml.{entry}", value)

    return add


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (changed("model", "t5"), "model 't5' is not supported \\(supported: gpt2, llama\\)"),
        (changed("model", None), "tokenizer.ggml.model is missing"),
        (changed("pre", "jina-v2-code"), "'jina-v2-code' is not supported \\(supported: gpt-2, llama-bpe"),
        (changed("pre", None), "tokenizer.ggml.pre is missing"),
        (changed("merges", ["a b c"]), "merges holds 'a b c', which does not consist of two tokens"),
        (changed("merges", ["nowhere x"]), "its tokenizer cannot be used"),
        (changed("tokens", ["a", "b", "a"]), "tokens has 'a' twice"),
        (changed("token_type", [1, 2]), "token_type must be an array of .* numbers, not an array of 2"),
        (changed("eos_token_id", "x"), "eos_token_id must be an integer from"),
        (changed("add_sep_token", True), "add_sep_token true is not supported"),
        (changed("scores", None, "llama"), "scores is missing"),
        (changed("scores", [0.0] * 318, "llama"), "scores (are equal for|must be an array)"),
        (changed("unknown_token_id", None, "llama"), "has no unknown token"),
        (changed("remove_extra_whitespaces", True, "llama"), "remove_extra_whitespaces is not supported"),
        (changed("precompiled_charsmap", [1, 2], "llama"), "precompiled_charsmap is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized_alike_is_refused(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason) as error:
        Ours.from_folder(write(tmp_path / "a.gguf", add))
    assert "\n" not in str(error.value)
    assert str(tmp_path / "a.gguf") in str(error.value)
