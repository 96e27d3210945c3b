"""Tasks on lists of words: edit them, write them in a format, name members of a category."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from .base import Check, Conversation, Split, join_words, line_list, pick
from .words import (
    CATEGORIES,
    things,
)

LIST_ASK = line_list("""
    List {k} {c}.
    Name {k} {c}.
    Give me {k} {c}.
    Can you list {k} {c}?
    Tell me {k} {c}.
    I need {k} {c}.
    Write down {k} {c}.
    Please name {k} {c}.
""")
LIST_EDITS: dict[str, tuple[list[str], Callable[[list[str]], list[str]]]] = {
    "reverse": (
        [
            "Reverse this list",
            "Put this list in reverse order",
            "Write this list backwards",
            "Turn this list around",
            "Give me the list in reverse",
        ],
        lambda xs: xs[::-1],
    ),
    "sort": (
        [
            "Sort this list",
            "Put this list in alphabetical order",
            "Order these words from A to Z",
            "Sort alphabetically",
            "Arrange these by the alphabet",
        ],
        sorted,
    ),
    "upper": (
        [
            "Write this list in upper case",
            "Make these words upper case",
            "Write these in capital letters",
            "Capitalize all letters",
            "Put this list in capitals",
        ],
        lambda xs: [x.upper() for x in xs],
    ),
    "first": (
        [
            "Give me the first item",
            "What is the first word",
            "Which item comes first",
            "Say only the first item",
            "Tell me the first one",
        ],
        lambda xs: xs[:1],
    ),
    "last": (
        [
            "Give me the last item",
            "What is the last word",
            "Which item comes last",
            "Say only the last item",
            "Tell me the last one",
        ],
        lambda xs: xs[-1:],
    ),
}
FORMATS: dict[str, tuple[list[str], Callable[[list[str]], str]]] = {
    "bullets": (
        [
            "as a bullet list",
            "as bullets",
            "in bullet points",
            "with a bullet for each",
            "as a bulleted list",
        ],
        lambda xs: "\n".join(f"- {x}" for x in xs),
    ),
    "numbers": (
        ["as a numbered list", "with numbers", "numbered", "as a list with numbers", "in a numbered list"],
        lambda xs: "\n".join(f"{i}. {x}" for i, x in enumerate(xs, 1)),
    ),
    "json": (["as a JSON list", "in JSON", "as a JSON array", "as JSON", "as an array in JSON"], json.dumps),
    "csv": (
        ["separated by commas", "as CSV", "on one line with commas", "as one CSV line", "comma separated"],
        ", ".join,
    ),
    "lines": (
        [
            "one per line",
            "each on its own line",
            "on separate lines",
            "line by line",
            "with one word per line",
        ],
        "\n".join,
    ),
}
FORMAT_ASK = line_list("""
    Write {x} {how}.
    Format {x} {how}.
    Show {x} {how}.
    Give me {x} {how}.
    Please write {x} {how}.
""")
AGAIN = line_list("""
    Now write them {how}.
    Now {how}, please.
    And {how}?
    Show them {how} instead.
    Can I have them {how}?
""")


def edit_list(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Reverse, sort, upper-case a list, or name its first or last item; then perhaps go on."""
    items = things(rng, split, rng.randint(2, 6))
    shown = ", ".join(items)
    for turn in range(rng.choice((1, 2, 2, 3))):
        asks, change = rng.choice(list(LIST_EDITS.values()))
        ask = pick(rng, split, asks)
        if turn:
            ask = f"Now {ask[0].lower()}{ask[1:]}." if rng.random() < 0.7 else f"{ask}."
        else:
            ask = f"{ask}: {shown}"
        items = change(items)
        chat.ask(ask, ", ".join(items), Check("exact", ", ".join(items)))
        if len(items) == 1:
            break


def format_list(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Write some words in one format, then in others."""
    items = things(rng, split, rng.randint(2, 6))
    kinds = rng.sample(list(FORMATS), rng.choice((1, 2, 3)))
    for turn, kind in enumerate(kinds):
        hows, write = FORMATS[kind]
        how, text = pick(rng, split, hows), write(items)
        ask = pick(rng, split, AGAIN if turn else FORMAT_ASK).format(x=join_words(items), how=how)
        chat.ask(ask, text, Check("json", items) if kind == "json" else Check("exact", text))


def name_things(rng: random.Random, split: Split, chat: Conversation) -> None:
    """List some members of a category, then one or two more."""
    # Categories are common knowledge, not slots: held-out chats ask for them in other words.
    category, members = rng.choice(list(CATEGORIES.items()))
    count = rng.randint(2, 6)
    shown = rng.sample(members, count + 2)
    kind = rng.choice(("bullets", "numbers", "csv"))
    ask = pick(rng, split, LIST_ASK).format(k=count, c=category)
    if rng.random() < 0.6 or kind == "csv":
        ask = f"{ask[:-1]} {pick(rng, split, FORMATS[kind][0])}{ask[-1]}"
    else:
        kind = "numbers"
    chat.ask(ask, FORMATS[kind][1](shown[:count]), Check("lines", (count, members)))
    if rng.random() < 0.3:
        chat.ask(
            rng.choice(("One more.", "Another one?", "Give me one more.")),
            shown[count],
            Check("lines", (1, members)),
        )
