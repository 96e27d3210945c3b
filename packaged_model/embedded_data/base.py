"""The shapes every family shares: a conversation, its checks, and the train/held-out split of lists.

Held-out data is disjoint from training data *by construction*: every template and every slot filler belongs
to one split by a hash of its own text (:func:`held_out`). The same word is thus held out in every list that
has it, an invented word needs no list at all, and wordings that differ in case or a full stop alone fall on
the same side.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

Split = Literal["train", "heldout"]
Message = dict[str, str]
T = TypeVar("T")

SPLITS: tuple[Split, ...] = ("train", "heldout")
_HELD_EVERY = 6
_SHORTEST = 4
# Written ``@do`` in a template: ways to ask for something that all end in an imperative.
POLITE = (
    "[|please |can you |could you |could you please |I want you to |I need you to |kindly |now |would you ]"
)


@dataclass(frozen=True)
class Check:
    """What a right reply to one assistant turn looks like; ``checks.score`` reads it."""

    kind: Literal[
        "exact", "answer", "python", "facts", "json", "keys", "any", "lines", "number", "calls", "no_call"
    ]
    want: object = None


@dataclass
class Conversation:
    """One chat of one family; ``checks[i]`` belongs to the i-th assistant message."""

    family: str
    messages: list[Message] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def ask(self, user: str, reply: str, check: Check | None = None) -> None:
        """Append one exchange; without a check any non-empty reply passes."""
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": reply})
        self.checks.append(check or Check("any"))

    def replies(self) -> list[tuple[list[Message], str, Check]]:
        """Every assistant turn as (messages before it, its text, its check)."""
        turns, seen = [], 0
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant":
                turns.append((self.messages[:index], message["content"], self.checks[seen]))
                seen += 1
        return turns


def _digest(item: object) -> int:
    text = item if isinstance(item, str) else repr(item)
    return zlib.crc32(text.lower().rstrip(" .?!:").encode())


def held_out(item: object) -> bool:
    """Whether this text (or tuple of texts) belongs to the held-out split: about one in six does."""
    return _digest(item) % _HELD_EVERY == 0


class Choices(list[T], Generic[T]):
    """A list that knows its members of each split; a draw takes a group first, then a member of it."""

    def __init__(self, groups: Iterable[Sequence[T]]) -> None:
        kept = [list(dict.fromkeys(group)) for group in groups]
        super().__init__(dict.fromkeys(item for group in kept for item in group))
        self.pools: dict[Split, list[list[T]]] = {}
        self.parts: dict[Split, list[T]] = {}
        if len(self) >= _SHORTEST:
            self._divide(kept)

    def _divide(self, groups: Sequence[Sequence[T]]) -> None:
        # A short list may have no member in the held-out class; then its lowest digest is held out.
        lowest = min(self, key=_digest)
        spare = not any(map(held_out, self))
        for split in SPLITS:
            mine = [
                [x for x in group if (held_out(x) or (spare and x == lowest)) == (split == "heldout")]
                for group in groups
            ]
            self.pools[split] = [group for group in mine if group]
            self.parts[split] = [item for group in self.pools[split] for item in group]

    def draw(self, rng: random.Random, split: Split) -> T:
        """One member of the split."""
        if not self.pools:
            raise ValueError(f"a list of {len(self)} is too short to hold any member out: {list(self)!r}")
        pools = self.pools[split]
        pool = pools[int(rng.random() * len(pools))]
        return pool[int(rng.random() * len(pool))]


def part(items: Sequence[T], split: Split) -> list[T]:
    """The members of ``items`` that belong to ``split``; the two splits never share a member."""
    choices = items if isinstance(items, Choices) else Choices([items])
    if not choices.parts:
        raise ValueError(f"a list of {len(items)} is too short to hold any member out: {list(items)!r}")
    return choices.parts[split]


def pick(rng: random.Random, split: Split, items: Sequence[T]) -> T:
    """One member of ``items`` from the given split."""
    return (items if isinstance(items, Choices) else Choices([items])).draw(rng, split)


def picks(rng: random.Random, split: Split, items: Sequence[T], count: int) -> list[T]:
    """``count`` different members of ``items`` from the split (fewer where the split has fewer)."""
    pool = part(items, split)
    return rng.sample(pool, min(count, len(pool)))


def wording(rng: random.Random, split: Split, items: Sequence[str]) -> str:
    """A template as people type it: now and then without its capital or its last mark."""
    text, chance = pick(rng, split, items), rng.random()
    if chance < 0.1 and text[1:2].islower():
        text = text[0].lower() + text[1:]
    return text.rstrip(".?") if 0.05 < chance < 0.15 else text


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def join_words(items: Sequence[str], last: str = "and") -> str:
    """Words joined as in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def article_for(noun: str) -> str:
    """``a`` or ``an`` before the noun."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def word_list(text: str) -> Choices[str]:
    """The words of a text, as a list that is easy to read and to add to."""
    return Choices([text.split()])


def expand(line: str) -> list[str]:
    """Every reading of a line with alternatives: ``[a|b] c`` is ``a c`` or ``b c``; ``@do`` asks politely."""
    parts = re.split(r"\[([^\[\]]*)\]", line.replace("@do ", POLITE))
    options: list[Any] = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
    texts = [re.sub(r" +", " ", "".join(chosen)).strip() for chosen in product(*options)]
    if any(mark in text for text in texts for mark in "[]"):
        raise ValueError(f"alternatives cannot be nested: {line!r}")
    return [sentence(text) for text in texts] if "@do " in line else texts


def line_list(text: str) -> Choices[str]:
    """The lines of a text without their indentation, one group of templates a line."""
    return Choices([expand(line.strip()) for line in text.strip().splitlines()])


def sections(name: str) -> dict[str, Choices[str]]:
    """The template lists of a text file beside this module, by the heading above each."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
    blocks = [block.partition("\n") for block in text.strip().split("# ")[1:]]
    return {title.strip(): line_list(lines) for title, _, lines in blocks}
