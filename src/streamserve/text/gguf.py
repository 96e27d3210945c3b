"""The tokenizer of a GGUF file, built with the library `tokenizers` from the entries tokenizer.ggml.*."""

from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from streamserve.gguf.files import GgufModel
from streamserve.gguf.metadata import Metadata, shown

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens in the entry tokenizer.ggml.token_type."""
SPACE = "▁"
MAX_PIECE = 128
"""Maximum characters of a token in a SentencePiece vocabulary; usually they have up to 16."""
NAMED = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator",
    "pad_token": "padding", "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip
"""Names of special tokens, and the entries with their ids."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}" + _REST_WITH_SLASH
GPT4O = rf"{_CASED[0]}{_ENDING}|{_CASED[1]}{_ENDING}|\p{{N}}{{1,3}}" + _REST_WITH_SLASH


@dataclass(frozen=True)
class Splitting:
    """How a text is split before pairs are merged.

    - `pattern`: the regular expression of the parts; None: GPT-2's.
    - `digits`: split into single digits first.
    - `nfc`: normalize the text before that.
    - `whole`: a part that is a token stays whole.
    - `bos`: a text begins with the bos token, unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_LLAMA = Splitting(LLAMA3, whole=True, bos=True)
SPLITTINGS = {
    "gpt-2": Splitting(),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "smaug-bpe": Splitting(LLAMA3, whole=True),  # SmolLM3
    "dbrx": Splitting(LLAMA3),  # Phi-4, OLMo 2 and 3
    "glm4": Splitting(LLAMA3),
    "qwen2": Splitting(QWEN2, nfc=True),
    "smollm": Splitting(digits=True),
    "refact": Splitting(digits=True),  # Granite 3
    "tekken": Splitting(TEKKEN, whole=True, bos=True),  # Mistral Nemo and later
    "gpt-4o": Splitting(GPT4O),  # Phi-4-mini
}
"""The splitting for each supported value of the entry tokenizer.ggml.pre."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, with the special tokens and the chat templates of its file. `tool_template` is the
    template named tool_use, which renders conversations with tools."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None


def read_tokenizer(model: GgufModel) -> GgufTokenizer:
    """Return the tokenizer of a model. Raises CheckpointError naming an entry that is not supported, and the
    library's errors for inconsistent entries."""
    metadata = model.metadata
    kind = metadata.text(PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        metadata.refuse(PREFIX + "model", f"{shown(kind)} is not supported (supported: gpt2, llama)")
    tokens = metadata.texts(PREFIX + "tokens")
    if not tokens:
        metadata.refuse(PREFIX + "tokens", "is empty")
    vocabulary = {text: number for number, text in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(text for number, text in enumerate(tokens) if vocabulary[text] != number)
        metadata.refuse(PREFIX + "tokens", f"has {shown(twice)} twice")
    types = _types(metadata, len(tokens))
    special = _special_tokens(metadata, tokens)
    make = _byte_level if kind == "gpt2" else _sentencepiece
    backend, bos = make(metadata, vocabulary, types, special)
    added = np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED)).nonzero()[0]
    backend.add_tokens(
        [AddedToken(tokens[i], special=bool(types[i] != USER_DEFINED), normalized=False) for i in added]
    )
    _add_ends(metadata, backend, special, bos)
    template, tool_template = (
        metadata.text(f"tokenizer.chat_template{name}", "") or None for name in ("", ".tool_use")
    )
    return GgufTokenizer(backend, special, template, tool_template)


def _types(metadata: Metadata, count: int) -> np.ndarray:
    key = PREFIX + "token_type"
    if key not in metadata:
        metadata.refuse(key, "is missing")
    types = metadata.numbers(key, count)
    if not ((types >= NORMAL) & (types <= BYTE)).all():
        metadata.refuse(key, f"must hold numbers from {NORMAL} to {BYTE}")
    return types


def _end_of_text(metadata: Metadata) -> int:
    return metadata.integer(f"{PREFIX}eos_token_id", -1, minimum=-(2**31), maximum=2**32 - 1)


def _special_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
    """Return the texts of the named special tokens. An end-of-text id without a token is left out: the model
    is served without it."""
    ids = {name: f"{PREFIX}{entry}_token_id" for name, entry in NAMED.items()}
    if not 0 <= _end_of_text(metadata) < len(tokens):
        ids.pop("eos_token")
    return {
        name: tokens[metadata.integer(key, minimum=0, maximum=len(tokens) - 1)]
        for name, key in ids.items()
        if key in metadata
    }


def _byte_level(
    metadata: Metadata, vocabulary: dict[str, int], types: np.ndarray, special: dict[str, str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE, and whether a text begins with the bos token by default."""
    key = PREFIX + "pre"
    name = metadata.text(key)
    if name not in SPLITTINGS:
        metadata.refuse(key, f"{shown(name)} is not supported (supported: {', '.join(SPLITTINGS)})")
    splitting = SPLITTINGS[name]
    merges = _merges(metadata)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.whole))
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.bos


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, in order of priority."""
    key = PREFIX + "merges"
    pairs = []
    for text in metadata.texts(key):
        first, _, second = text.partition(" ")
        if not first or not second or " " in second:
            metadata.refuse(key, f"holds {shown(text)}, which does not consist of two tokens")
        pairs.append((first, second))
    return pairs


def _sentencepiece(
    metadata: Metadata, vocabulary: dict[str, int], types: np.ndarray, special: dict[str, str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a BPE over characters with byte fallback. It merges the pair with the best score first."""
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        value = metadata.entries.get(PREFIX + name)
        if value is not None and value is not False and (value is True or len(value)):
            metadata.refuse(PREFIX + name, "is not supported")
    missing = next((f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary), None)
    if missing or "unk_token" not in special:
        metadata.refuse(PREFIX + "tokens", f"has no {missing or 'unknown token'}: text would be lost")
    spaced = next(
        (text for text, i in vocabulary.items() if types[i] == USER_DEFINED and SPACE in text), None
    )
    if spaced:
        metadata.refuse(
            PREFIX + "tokens", f"defines {shown(spaced)}: {SPACE} is supported in normal tokens only"
        )
    scores = metadata.numbers(PREFIX + "scores", len(vocabulary))
    vocabulary = _with_characters(vocabulary, types)
    model = models.BPE(
        vocabulary, _scored_merges(metadata, vocabulary, types, scores),
        unk_token=special["unk_token"], fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    backend = tokenizers.Tokenizer(model)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", SPACE)
    if metadata.flag(PREFIX + "add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(parts)
    return backend, True


def _with_characters(vocabulary: dict[str, int], types: np.ndarray) -> dict[str, int]:
    """Return the vocabulary with additional names for some bytes. If an ASCII character is part of normal
    tokens but has only a byte's token, this token gets the character as its name: so pairs with the character
    are merged, too. An example is Gemma's tab."""
    used = {character for text, i in vocabulary.items() if types[i] == NORMAL for character in text}
    named = {f"<0x{ord(one):02X}>": one for one in used - vocabulary.keys() if one.isascii()}
    return {named.get(text, text): i for text, i in vocabulary.items()}


def _scored_merges(
    metadata: Metadata, vocabulary: dict[str, int], types: np.ndarray, scores: np.ndarray
) -> list[tuple[str, str]]:
    """Return all pairs of normal tokens whose concatenation is a normal token. Pairs with the best score come
    first; among the pairs of one token, the pair with the longest first part, as transformers orders them."""
    normal = {
        text: float(scores[i])
        for text, i in vocabulary.items()
        if types[i] == NORMAL or (types[i] == BYTE and len(text) == 1)
    }
    merges: list[tuple[float, str, str]] = []
    by_score = dict[float, str]()
    for text, score in normal.items():
        if len(text) > MAX_PIECE:
            metadata.refuse(
                PREFIX + "tokens", f"has a token of more than {MAX_PIECE} characters: {shown(text)}"
            )
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found = [(score, first, second) for first, second in pairs if first in normal and second in normal]
        if found and by_score.setdefault(score, text) != text:
            metadata.refuse(
                PREFIX + "scores",
                f"are equal for {shown(by_score[score])} and {shown(text)}, so the order of merges is "
                "unknown",
            )
        merges += found
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(first, second) for _, first, second in merges]


def _add_ends(metadata: Metadata, backend: tokenizers.Tokenizer, special: dict[str, str], bos: bool) -> None:
    """Let texts begin and end with the special tokens that the file asks for."""
    before = special.get("bos_token") if metadata.flag(PREFIX + "add_bos_token", bos) else None
    after = special.get("eos_token") if metadata.flag(PREFIX + "add_eos_token", False) else None
    if metadata.flag(PREFIX + "add_sep_token", False):
        metadata.refuse(PREFIX + "add_sep_token", "true is not supported")
    if before is None and after is None:
        return
    pieces = [text for text in (before, "$A", after) if text]
    ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys((before, after)) if text]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)
