"""Tasks on lists of words: edit them, write them in a format, name members of a category."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from .base import Check, Conversation, Split, join_words, line_list, pick, wording
from .words import (
    CATEGORIES,
    things,
)

LIST_ASK = line_list("""
    @do [list|name|give me|tell me|write down|show me|write|find] {k} {c}.
    [List|Name|Write down|Tell me|Give me] [any|some] {k} {c}[|, please].
    I [need|want|would like] [a list of|the names of|] {k} {c}.
    [What are|Which are|Do you know] {k} {c}?
    [A list of|The names of|Examples:] {k} {c}[|, please].
""")
_THIS = "[this list|these words|these items|the following|the list|the words]"
LIST_EDITS: dict[str, tuple[Sequence[str], Callable[[list[str]], list[str]]]] = {
    "reverse": (
        line_list(f"""
            @do [put|write|give me|show|return|say] {_THIS} [in reverse order|in reverse|backwards|from \
                last to first]
            @do [reverse|turn around|flip] {_THIS}[| for me]
            @do reverse the order of {_THIS}
        """),
        lambda xs: xs[::-1],
    ),
    "sort": (
        line_list(f"""
            @do [put|write|give me|show|arrange|return] {_THIS} [in alphabetical order|from A to Z|in \
                order of the alphabet]
            @do [sort|order|arrange] {_THIS} [alphabetically|by the alphabet|from A to Z|by letter]
            @do sort {_THIS}
        """),
        lambda xs: sorted(xs, key=str.lower),
    ),
    "upper": (
        line_list(f"""
            @do [put|write|give me|show|return] {_THIS} in [upper case|capital \
                letters|capitals|uppercase|big letters]
            @do [make|turn] {_THIS} [upper case|uppercase]
            @do [uppercase|capitalize all letters of] {_THIS}
        """),
        lambda xs: [x.upper() for x in xs],
    ),
    "first": (
        line_list("""
            @do [give me|tell me|say|name|write|return|pick] [only|just|] the first \
                [item|word|one|entry|element]
            [What is|Which is] the first [item|word|one|entry|element]
            Which [item|word|one|entry] [comes|is|stands] first
        """),
        lambda xs: xs[:1],
    ),
    "last": (
        line_list("""
            @do [give me|tell me|say|name|write|return|pick] [only|just|] the last \
                [item|word|one|entry|element]
            [What is|Which is] the last [item|word|one|entry|element]
            Which [item|word|one|entry] [comes|is|stands] last
        """),
        lambda xs: xs[-1:],
    ),
    "drop first": (
        line_list("""
            @do [remove|drop|delete|leave out|take out] the first [item|word|one|entry|element]
            [Everything|All|All items|All words] [but|except] the first [item|word|one|entry|element]
        """),
        lambda xs: xs[1:] or xs,
    ),
    "drop last": (
        line_list("""
            @do [remove|drop|delete|leave out|take out] the last [item|word|one|entry|element]
            [Everything|All|All items|All words] [but|except] the last [item|word|one|entry|element]
        """),
        lambda xs: xs[:-1] or xs,
    ),
}
FORMATS: dict[str, tuple[Sequence[str], Callable[[list[str]], str]]] = {
    "bullets": (
        line_list("""
            [as|in the form of|like|in|formatted as] a [bullet|bulleted|bullet point] list
            [as|in|with|using|in the form of|formatted as] [bullets|bullet points|dashes]
            with a [bullet|dash] [for|before|in front of] [each|every one|each word]
        """),
        lambda xs: "\n".join(f"- {x}" for x in xs),
    ),
    "numbers": (
        line_list("""
            [as|in the form of|in|formatted as] a [numbered|] list with numbers
            [as|in|in the form of|formatted as] a numbered list
            [with|using] [numbers|a number for each|a number before each|numbers in front]
            [numbered|numbered one by one|with the items numbered|with each one numbered]
        """),
        lambda xs: "\n".join(f"{i}. {x}" for i, x in enumerate(xs, 1)),
    ),
    "json": (
        line_list("""
            [as|in the form of|formatted as|like] a JSON [list|array]
            [as|in|using|formatted as] JSON
            as [an array|a list] [in|of] JSON
            in [the|] JSON [format|form|notation]
        """),
        json.dumps,
    ),
    "csv": (
        line_list("""
            [separated|split|divided|joined] by commas
            [as|in|formatted as] [CSV|one CSV line|a CSV line]
            [on|in] [one|a single] line with commas
            [comma separated|with commas between them|with commas|as one line with commas]
        """),
        ", ".join,
    ),
    "lines": (
        line_list("""
            [one|one word|one item|one of them] [per|on each|in each|to a] line
            [each|every one|each word|each item] on [its own|a new|a separate|a line of its own] line
            on [separate|different|single|new] lines
            [line by line|with one word per line|with line breaks between them|below each other]
        """),
        "\n".join,
    ),
}
FORMAT_ASK = line_list("""
    @do [write|format|show|give me|print|list|put|return] {x} {how}.
    [Write|Format|Show|Give me|Print|List] [the words|the items|the list|these:] {x} {how}.
    {x}: @do [write|format|show|print|list] them {how}.
    I [want|need|would like] {x} {how}.
""")
AGAIN = line_list("""
    @do [write|show|format|print|list|give me|return] [them|these|it|the list|the same] {how}.
    [Now|And|And now|Next|Then] {how}[|, please|?].
    [Show|Write|Print] [them|it] {how} [instead|now|this time].
    [Can I|Could I|May I] have [them|it|the list] {how}?
""")
ONE_MORE = line_list("""
    [One|Just one] more[.|, please.]
    [Another|Another one|And another one][?|.|, please.]
    @do [name|give me|tell me|list] [one more|another one|another].
""")


def edit_list(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Reverse, sort, upper-case a list, or name its first or last item; then perhaps go on."""
    items = things(rng, split, rng.randint(2, 7))
    shown = ", ".join(items)
    for turn in range(rng.choice((1, 2, 2, 3))):
        asks, change = rng.choice(list(LIST_EDITS.values()))
        ask = pick(rng, split, asks)
        if turn:
            ask = f"Now {ask[0].lower()}{ask[1:]}." if rng.random() < 0.3 else f"{ask}."
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
        ask = wording(rng, split, AGAIN if turn else FORMAT_ASK).format(x=join_words(items), how=how)
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
            wording(rng, split, ONE_MORE),
            shown[count],
            Check("lines", (1, members)),
        )
