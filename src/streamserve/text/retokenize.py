"""Incremental tokenization: a changed text is retokenized only from the last boundary proven to be
unaffected.

BPE is not concatenative: the tokens of two texts may differ from the tokens of their concatenation. But with
the pipelines listed here, no token, merge or regular expression match ever crosses a boundary between a
character and a following space, whatever text comes after. So the text is split into pieces there, and only
changed pieces are tokenized. With tokenizers for which this is not proven, the whole text is tokenized each
time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from streamserve.text.prompt_text import PromptText
from streamserve.text.tokenizer import Tokenizer

PIECE = 1024
"""Minimum length of a piece in characters: it ends at the next boundary."""

THREAD_THRESHOLD = 8192
"""Characters that take about a millisecond to tokenize; longer texts are tokenized with the GIL released."""

SPLITS = frozenset(
    {
        # GPT-2
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Mistral's tekken
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Regular expressions that split texts into words.

In each of them, every alternative matches spaces only before other characters, so no match crosses a
boundary. None of them looks back, or ahead further than a run of whitespace and the character after it, so
the text after a boundary changes nothing before it.
"""


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether tokens(a + b) = tokens(a) + tokens(b), without special tokens added, wherever b begins
    with a space and a ends with a character other than whitespace.

    The pipeline, in order: added tokens are matched in the raw text, normalizers and pre-tokenizers process
    the text between them, and BPE merges within the resulting words.
    """
    pipeline = tokenizer.description()
    model = pipeline["model"]
    normalizers = _parts(pipeline["normalizer"], "normalizers")
    pre_tokenizers = _parts(pipeline["pre_tokenizer"], "pretokenizers")
    if (
        model["type"] != "BPE"
        or model.get("dropout")
        or any(map(_reaches_over, pipeline["added_tokens"]))
        or not all(map(_local_normalizer, normalizers))
        or not all(map(_local_pre_tokenizer, pre_tokenizers))
    ):
        return False
    if any(part["type"] in ("Replace", "Metaspace") for part in (*normalizers, *pre_tokenizers)):
        return _no_merge_crosses(model)
    return any(map(_is_split, pre_tokenizers))


def _parts(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _spacing(character: str) -> bool:
    """Return whether a character is whitespace, or the sign that some vocabularies write for a space."""
    return character.isspace() or character == "▁"


def _crosses(text: str) -> bool:
    """Return whether `text` contains a boundary."""
    return any(second in " ▁" and not _spacing(first) for first, second in pairwise(text))


def _reaches_over(token: dict[str, Any]) -> bool:
    """Return whether an added token consumes or depends on the text after it, or contains a boundary."""
    return bool(token["rstrip"] or token["single_word"] or _crosses(token["content"]))


def _local_normalizer(part: dict[str, Any]) -> bool:
    """Return whether a normalizer has no effect across a boundary.

    A space never composes with the character before it.
    """
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"] == "▁")
    return bool(part["type"] in ("NFC", "NFD"))


def _local_pre_tokenizer(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer has no effect across a boundary.

    A prefix space is added only to text that does not begin with a space, so never after a boundary.
    """
    if part["type"] == "ByteLevel":
        return True
    if part["type"] == "Split":
        return _is_split(part)
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == "▁" and not part["split"])
    return bool(part["type"] == "Digits")


def _is_split(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits a text into words that contain no boundary."""
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"])
    pattern = part.get("pattern", {}).get("Regex")
    return pattern in SPLITS and part["behavior"] == "Isolated" and not part["invert"]


def _no_merge_crosses(model: dict[str, Any]) -> bool:
    """Return whether no token of the vocabulary contains a boundary, so that BPE cannot merge across a
    boundary.

    Used where BPE sees the whole text as one word. The space must have a token, because unknown characters
    might be fused.
    """
    odd = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        not any(model.get(name) for name in odd)
        and "▁" in model["vocab"]
        and not any(map(_crosses, model["vocab"]))
    )


@dataclass(frozen=True)
class Tokenized:
    """A prompt's token ids, and the end of each of its pieces, in characters and in tokens."""

    prompt: PromptText
    ids: list[int]
    ends: list[tuple[int, int]]

    @property
    def text(self) -> str:
        return self.prompt.text


EMPTY = Tokenized(PromptText(""), [], [])


class Retokenizer:
    """Tokenizes successive versions of a text.

    Adds no special tokens. Recognizes special tokens written in the text, as Tokenizer.encode_prompt does,
    but not in its literal parts. No part crosses a boundary, as no special token contains one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts_at_spaces(tokenizer)

    def encode(self, text: str | PromptText, before: Tokenized = EMPTY) -> Tokenized:
        """Return the tokens of a text, reusing the tokens of an earlier version.

        The result is identical to tokenizing the text as a whole. Raises ValueError for text that is not
        Unicode.
        """
        prompt = PromptText(text) if isinstance(text, str) else text
        if not self._cuts or (prompt.literal and self._tokenizer.prefixes_segments):
            return Tokenized(prompt, self._encode([prompt])[0], [])
        same = _common_length(before.prompt, prompt)
        # A piece ends before a space. Both texts must have that space, so the end of the earlier text is
        # never reused.
        reused = [end for end in before.ends if end[0] < same]
        start, count = reused[-1] if reused else (0, 0)
        cuts = [start, *_boundaries(prompt.text, start)]
        pieces = [prompt.between(*span) for span in pairwise(cuts)]
        new = self._encode(pieces)
        lengths = zip((len(piece.text) for piece in pieces), map(len, new), strict=True)
        ends = accumulate(
            lengths,
            lambda first, second: (first[0] + second[0], first[1] + second[1]),
            initial=(start, count),
        )
        ids = before.ids[:count] + [token for piece in new for token in piece]
        return Tokenized(prompt, ids, reused[:-1] + list(ends))

    def _encode(self, pieces: list[PromptText]) -> list[list[int]]:
        """Tokenize pieces. For long pieces the GIL is released, which is slower for short pieces."""
        texts = [piece.text for piece in pieces if not piece.literal]
        if sum(map(len, texts)) > THREAD_THRESHOLD:
            plain = iter(self._tokenizer.encode_without_gil(texts, add_special_tokens=False))
        else:
            plain = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        encode = self._tokenizer.encode_prompt
        return [encode(piece, add_special_tokens=False) if piece.literal else next(plain) for piece in pieces]


def _common_length(first: PromptText, second: PromptText) -> int:
    """Return the number of characters that two prompts begin with, in parts that are literal in both or in
    neither."""
    same = common_prefix(first.text, second.text)
    if first.literal == second.literal:
        return same
    changed = zip_longest(first.literal, second.literal, fillvalue=(same, same))
    return min(same, *next((one[0], other[0]) for one, other in changed if one != other))


def _boundaries(text: str, start: int) -> Iterator[int]:
    """Yield the ends of the pieces of the text from `start` on."""
    while start < len(text):
        start = _boundary(text, start + PIECE)
        yield start


def _boundary(text: str, start: int) -> int:
    """Return the first space at or after `start` that follows a character other than whitespace.

    Without such a space, return the end of the text.
    """
    while (space := text.find(" ", start)) > 0:
        if not _spacing(text[space - 1]):
            return space
        start = space + 1
    return len(text)


def common_prefix(first: str | list[int], second: str | list[int]) -> int:
    """Return the length of the common prefix of two texts, or two lists of tokens.

    A binary search over slices, which is a hundred times faster than comparing elements.
    """
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # equal before `low`; a difference before `high`
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
