"""The shapes every family shares: a conversation, its checks, and the train/held-out split of lists.

Held-out data is disjoint from training data *by construction*: every list of templates and of slot fillers
goes through :func:`part`, which gives each split its own members and never shares one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
Message = dict[str, str]
T = TypeVar("T")

# Every sixth member, starting with the fourth, is held out: a share of one in six, from four members up.
_HELD_FIRST, _HELD_EVERY = 3, 6


@dataclass(frozen=True)
class Check:
    """What a right reply to one assistant turn looks like; ``checks.score`` reads it."""

    kind: Literal["exact", "answer", "python", "facts", "json", "any", "lines", "number"]
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


def part(items: Sequence[T], split: Split) -> list[T]:
    """The members of ``items`` that belong to ``split``; the two splits never share a member."""
    if len(items) <= _HELD_FIRST:
        raise ValueError(f"a list of {len(items)} is too short to hold any member out: {items!r}")
    held = set(range(_HELD_FIRST, len(items), _HELD_EVERY))
    return [item for index, item in enumerate(items) if (index in held) == (split == "heldout")]


def pick(rng: random.Random, split: Split, items: Sequence[T]) -> T:
    """One member of ``items`` from the given split."""
    return rng.choice(part(items, split))


def picks(rng: random.Random, split: Split, items: Sequence[T], count: int) -> list[T]:
    """``count`` different members of ``items`` from the split (fewer where the split has fewer)."""
    pool = part(items, split)
    return rng.sample(pool, min(count, len(pool)))


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


def word_list(text: str) -> list[str]:
    """The words of a text, as a list that is easy to read and to add to."""
    return text.split()


def line_list(text: str) -> list[str]:
    """The lines of a text without their indentation, one template a line."""
    return [line.strip() for line in text.strip().splitlines()]
