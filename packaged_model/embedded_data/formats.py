"""Answers in a given form: exact words, lists in a format, upper and lower case, members of a category."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import list_tasks, sentence_tasks
from .base import Check, Choices, Conversation, Split, line_list, wording
from .words import things

WRAPS: dict[str, tuple[Choices[str], Callable[[str], str]]] = {
    "quotes": (
        line_list("""
            in [quotes|double quotes|quotation marks]
            [between|within|inside] [quotes|double quotes|quotation marks]
            with [quotes|quotation marks] [around it|around]
            [put|set] in [quotes|quotation marks]
        """),
        lambda text: f'"{text}"',
    ),
    "brackets": (
        line_list("""
            in [brackets|square brackets]
            [between|within|inside] [brackets|square brackets]
            with [brackets|square brackets] [around it|around]
            [put|set] in [brackets|square brackets]
        """),
        lambda text: f"[{text}]",
    ),
    "parentheses": (
        line_list("""
            in [parentheses|round brackets]
            [between|within|inside] [parentheses|round brackets]
            with [parentheses|round brackets] [around it|around]
            [put|set] in [parentheses|round brackets]
        """),
        lambda text: f"({text})",
    ),
    "bold": (
        line_list("""
            in [bold|bold letters|bold type]
            [between|with|inside] [two stars|double asterisks]
            [made|set|printed] in bold
            [as|like] bold [text|Markdown]
        """),
        lambda text: f"**{text}**",
    ),
    "upper": (
        line_list("""
            in [capitals|capital letters|upper case|all capitals]
            [all|only|entirely] in [capitals|capital letters|upper case]
            with [capital letters|capitals] [only|alone]
            [written|set|printed] in [capitals|upper case]
        """),
        str.upper,
    ),
    "stop": (
        line_list("""
            [with|and] a [full stop|period|dot] [at the end|after it]
            [ending|that ends] [with|in] a [full stop|period|dot]
            [followed|closed] by a [full stop|period|dot]
            with a [final|last] [full stop|period|dot]
        """),
        lambda text: f"{text}.",
    ),
}
ASK_ONLY = line_list("""
    @do [answer|reply|respond] [only|just] with {x}
    @do [say|write|print|return] {x} and nothing [else|more]
    @do [say|write|print|return] [only|just|exactly] {x}
    [Answer|Reply|Say|Write] {x}[, nothing else|, no more|, that is all]
    [Your|The] [only|whole] [answer|reply] is {x}
""")
ASK_WRAPPED = line_list("""
    @do [write|put|give me|print|show] {x} {how}
    [Write|Print|Show|Put] {x} {how}[, nothing else|, please|]
    {x}[:|, but] {how}
    I [want|need|would like] {x} {how}
""")
NOW = line_list("""
    [Now|And now|Next|Then] {how}
    [The same|The same thing|It again|Once more] {how}
    @do [write|show|print|give me] it {how}
""")


def say_only(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Reply with exactly the words that were given."""
    text = " ".join(things(rng, split, rng.choice((1, 1, 2, 3, 4))))
    ask = wording(rng, split, ASK_ONLY)
    asked = ask.format(x=f'"{text}"' if rng.random() < 0.3 else text)
    chat.ask(asked + rng.choice(("", "", ".")), text, Check("exact", text))


def wrap(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Write some words in quotes, in brackets, in capitals, …; then in another form."""
    text = " ".join(things(rng, split, rng.choice((1, 1, 2, 3))))
    for turn, kind in enumerate(rng.sample(list(WRAPS), rng.choice((1, 2)))):
        hows, change = WRAPS[kind]
        how = hows.draw(rng, split)
        asked = wording(rng, split, NOW if turn else ASK_WRAPPED).format(x=text, how=how)
        chat.ask(f"{asked}.", change(text), Check("exact", change(text)))


TASKS = (
    (list_tasks.edit_list, 2.0), (list_tasks.format_list, 3.0), (list_tasks.name_things, 2.0),
    (sentence_tasks.change_case, 2.0), (sentence_tasks.extract, 1.0), (say_only, 1.0), (wrap, 1.0),
)  # fmt: skip


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """One or two tasks in one chat."""
    chat = Conversation("formats")
    for _ in range(rng.choice((1, 1, 2))):
        rng.choices([task for task, _ in TASKS], [weight for _, weight in TASKS])[0](rng, split, chat)
    return chat
