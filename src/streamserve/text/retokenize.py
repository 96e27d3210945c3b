"""A text that changes, tokenized anew only from the last boundary that is proven unchanged.

BPE is not concatenative: the tokens of two texts are not those of both together. But a boundary between a
character and the space behind it is one that, with the pipelines named here, no token, merge or regular
expression ever crosses, whatever follows. So a text is cut there into pieces, and only the pieces that
changed are tokenized. Tokenizers that this is not proven for tokenize the whole text each time.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from streamserve.text.tokenizer import Tokenizer

PIECE = 1024
"""Characters after which the next boundary ends a piece."""

APART = 8192
"""Characters that take about a millisecond to tokenize; longer texts belong into a thread."""

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
"""Regular expressions that cut texts into words. In each, every alternative matches spaces only before
other characters, so no match crosses a boundary; and none looks behind, or ahead further than a run of
whitespace and the character after it, so what follows a boundary changes nothing before it."""


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether tokens(a + b) = tokens(a) + tokens(b), without special tokens around them, wherever b begins
    with a space and a ends with something else.

    The parts of the pipeline, in order: added tokens are found in the raw text, normalizers and
    pre-tokenizers work on what is between, and BPE merges within the words that come out.
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
    """Whether it is whitespace, or what some vocabularies write for a space."""
    return character.isspace() or character == "▁"


def _crosses(text: str) -> bool:
    """Whether a boundary lies inside of `text`."""
    return any(second in " ▁" and not _spacing(first) for first, second in pairwise(text))


def _reaches_over(token: dict[str, Any]) -> bool:
    """Whether an added token may swallow the space behind it, depends on it, or holds a boundary."""
    return bool(token["rstrip"] or token["single_word"] or _crosses(token["content"]))


def _local_normalizer(part: dict[str, Any]) -> bool:
    """A space never composes with what is before it, so composition happens on either side of it."""
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"] == "▁")
    return bool(part["type"] in ("NFC", "NFD"))


def _local_pre_tokenizer(part: dict[str, Any]) -> bool:
    """A prefix space is only given to what does not begin with one, so never behind a boundary."""
    if part["type"] == "ByteLevel":
        return True
    if part["type"] == "Split":
        return _is_split(part)
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == "▁" and not part["split"])
    return bool(part["type"] == "Digits")


def _is_split(part: dict[str, Any]) -> bool:
    """Whether it makes words of a text, none of which holds a boundary."""
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"])
    pattern = part.get("pattern", {}).get("Regex")
    return pattern in SPLITS and part["behavior"] == "Isolated" and not part["invert"]


def _no_merge_crosses(model: dict[str, Any]) -> bool:
    """Where the whole text is one word to BPE: whether no token of the vocabulary holds a boundary, so that
    none can be merged across one. The space must have a token, or unknown characters might be fused."""
    odd = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        not any(model.get(name) for name in odd)
        and "▁" in model["vocab"]
        and not any(map(_crosses, model["vocab"]))
    )


@dataclass(frozen=True)
class Tokenized:
    """A text's token ids, and its pieces as their ends: characters, and tokens up to there."""

    text: str
    ids: list[int]
    ends: list[tuple[int, int]]


NOTHING = Tokenized("", [], [])


class Retokenizer:
    """Tokenizes one version of a text after the other. Not what stands around it: no special tokens are
    added, but those written out in the text are recognized, as Tokenizer.encode does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts_at_spaces(tokenizer)

    def encode(self, text: str, before: Tokenized = NOTHING) -> Tokenized:
        """The tokens of `text`, exactly as of the whole text at once, with the help of an earlier version's.
        Raises ValueError for text that isn't Unicode."""
        if not self._cuts:
            return Tokenized(text, self._encode([text])[0], [])
        same = common_prefix(before.text, text)
        kept = [end for end in before.ends if end[0] < same]
        start, count = kept[-1] if kept else (0, 0)
        pieces = _pieces(text, start)
        new = self._encode(pieces)
        lengths = zip(map(len, pieces), map(len, new), strict=True)
        ends = accumulate(
            lengths, lambda one, two: (one[0] + two[0], one[1] + two[1]), initial=(start, count)
        )
        ids = before.ids[:count] + [token for piece in new for token in piece]
        return Tokenized(text, ids, kept[:-1] + list(ends))

    def _encode(self, pieces: list[str]) -> list[list[int]]:
        """Many characters are encoded so that other threads run meanwhile, which takes longer for few."""
        if sum(map(len, pieces)) > APART:
            return self._tokenizer.encode_apart(pieces, add_special_tokens=False)
        return [self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]


def _pieces(text: str, start: int) -> list[str]:
    """The text from `start` on, cut at boundaries."""
    pieces = []
    while start < len(text):
        end = _boundary(text, start + PIECE)
        pieces.append(text[start:end])
        start = end
    return pieces


def _boundary(text: str, start: int) -> int:
    """The first space at or after `start` that follows something else, or else the end of the text."""
    while (space := text.find(" ", start)) > 0:
        if not _spacing(text[space - 1]):
            return space
        start = space + 1
    return len(text)


def common_prefix(one: str | list[int], two: str | list[int]) -> int:
    """The length of what two texts, or two lists of tokens, begin with alike. Slices are compared, which is
    a hundred times faster than their members."""
    low, high = 0, min(len(one), len(two))
    if one[:high] == two[:high]:
        return high
    while high - low > 1:  # what is before `low` is alike, and something before `high` is not
        middle = (low + high) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle
    return low
