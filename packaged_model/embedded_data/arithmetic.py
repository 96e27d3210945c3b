"""Grade-school word problems solved step by step, ending in ``answer: N``; and plain sums."""

from __future__ import annotations

import random
from collections.abc import Callable

from .base import Check, Conversation, Split, pick, sections, sentence, wording
from .words import CONTAINERS, JOBS, OBJECTS, PLACES, SPORTS, WEEKDAYS, count_of, filler, person, plural

_TEXT = sections("arithmetic")
Problem = tuple[str, list[str], int]

REPLIES = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def _slots(rng: random.Random, split: Split) -> dict[str, str]:
    name, sub, poss = person(rng, split)
    friend = person(rng, split)[0]
    while friend == name:
        friend = person(rng, split)[0]
    thing, box = filler(rng, split, OBJECTS), pick(rng, split, CONTAINERS)
    return {
        "n": name,
        "friend": friend,
        "sub": sub,
        "Sub": sentence(sub),
        "pro": "her" if sub == "she" else "him",
        "Poss": sentence(poss),
        "thing": thing,
        "things": plural(thing),
        "box": box,
        "boxes": plural(box),
        "place": filler(rng, split, PLACES),
        "sport": pick(rng, split, SPORTS),
        "job": pick(rng, split, JOBS),
        "weekday": rng.choice(WEEKDAYS),
        "possname": "hers" if sub == "she" else "his",
    }


def _chain(rng: random.Random, split: Split) -> Problem:
    """A quantity that several events change, one after another."""
    slots = _slots(rng, split)
    total = rng.randint(3, rng.choice((10, 20, 60, 100)))
    text = [pick(rng, split, _TEXT["start"]).format(k=total, **slots)]
    steps = [f"{slots['n']} starts with {count_of(total, slots['thing'])}."]
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        gains = total < 6 or (total < 120 and rng.random() < 0.5)
        k = rng.randint(2, 40) if gains else rng.randint(2, total - 1)
        text.append(pick(rng, split, _TEXT["gain"] if gains else _TEXT["lose"]).format(k=k, **slots))
        after = total + k if gains else total - k
        steps.append(f"{total} {'+' if gains else '-'} {k} = {after}.")
        total = after
    if rng.random() < 0.35:
        fact = pick(rng, split, _TEXT["distract"]).format(d=rng.randint(2, 20), **slots)
        text.insert(rng.randint(1, len(text)), fact)
    text.append(pick(rng, split, _TEXT["how_many"]).format(**slots))
    return " ".join(text), steps, total


def _simple(
    templates: list[str], symbol: str, draw: Callable[[random.Random], tuple[int, int]]
) -> Callable[[random.Random, Split], Problem]:
    """A one-step problem with the two numbers ``draw`` gives, joined by ``symbol``."""

    def problem(rng: random.Random, split: Split) -> Problem:
        a, b = draw(rng)
        total = _apply(a, symbol, b)
        slots = _slots(rng, split)
        # {t} is what gets shared: the dividend; {a} is then the number of shares.
        values = {"t": a, "a": b, "b": 0} if symbol == "/" else {"t": 0, "a": a, "b": b}
        return pick(rng, split, templates).format(**values, **slots), [f"{a} {symbol} {b} = {total}."], total

    return problem


def _two_step(rng: random.Random, split: Split) -> Problem:
    """Groups first, then a gain or a loss."""
    slots = _slots(rng, split)
    a, b = rng.randint(2, 10), rng.randint(2, 10)
    made = a * b
    gains = rng.random() < 0.5
    k = rng.randint(1, 30) if gains else rng.randint(1, made - 1)
    total = made + k if gains else made - k
    packed = pick(rng, split, _TEXT["packed"])
    event = pick(rng, split, _TEXT["gain"] if gains else _TEXT["lose"]).format(k=k, **slots)
    question = pick(rng, split, _TEXT["how_many"]).format(**slots)
    steps = [f"{a} * {b} = {made}.", f"{made} {'+' if gains else '-'} {k} = {total}."]
    return f"{packed.format(a=a, b=b, **slots)} {event} {question}", steps, total


def _apply(a: int, symbol: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[symbol]


def _share_numbers(rng: random.Random) -> tuple[int, int]:
    each, people = rng.randint(2, 12), rng.randint(2, 10)
    return each * people, people


def _larger_first(rng: random.Random) -> tuple[int, int]:
    a = rng.randint(4, 99)
    return a, rng.randint(1, a - 1)


def _sum_numbers(rng: random.Random) -> tuple[int, int]:
    top = rng.choice((10, 20, 50, 99))
    return rng.randint(1, top), rng.randint(1, top)


def _times_numbers(rng: random.Random) -> tuple[int, int]:
    return (
        (rng.randint(2, 12), rng.randint(2, 12))
        if rng.random() < 0.8
        else (rng.randint(2, 20), rng.randint(2, 10))
    )


PROBLEMS: list[tuple[Callable[[random.Random, Split], Problem], float]] = [
    (_chain, 5),
    (_two_step, 1.5),
    (_simple(_TEXT["groups"], "*", _times_numbers), 1),
    (_simple(_TEXT["share"], "/", _share_numbers), 1),
    (_simple(_TEXT["more"], "+", _sum_numbers), 0.8),
    (_simple(_TEXT["fewer"], "-", _larger_first), 0.8),
    (_simple(_TEXT["both"], "+", _sum_numbers), 1),
    (_simple(_TEXT["price"], "*", _times_numbers), 0.8),
    (_simple(_TEXT["change"], "-", _larger_first), 0.8),
]


def _follow_up(rng: random.Random, split: Split, chat: Conversation, total: int) -> int:
    """One turn that changes the last answer."""
    adds = total < 5 or rng.random() < 0.5
    k = rng.randint(1, 20) if adds else rng.randint(1, total - 1)
    after = total + k if adds else total - k
    text = wording(rng, split, _TEXT["follow_more"] if adds else _TEXT["follow_less"]).format(k=k)
    chat.ask(text, f"{total} {'+' if adds else '-'} {k} = {after}.\nanswer: {after}", Check("answer", after))
    return after


def sums(rng: random.Random, split: Split) -> Conversation:
    """Plain calculations, some of them in several turns."""
    chat = Conversation("arithmetic")
    for _ in range(rng.choice((1, 2, 3, 4))):
        symbol = rng.choice("++-*/")
        draw = {"+": _sum_numbers, "-": _larger_first, "*": _times_numbers, "/": _share_numbers}[symbol]
        a, b = draw(rng)
        total = _apply(a, symbol, b)
        written = REPLIES[symbol] if rng.random() < 0.2 else symbol
        reply = f"{a} {symbol} {b} = {total}."
        chat.ask(
            wording(rng, split, _TEXT["sums"]).format(e=f"{a} {written} {b}"), reply, Check("number", total)
        )
    return chat


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """A word problem with follow-ups, or plain sums."""
    if rng.random() < 0.25:
        return sums(rng, split)
    chat = Conversation("arithmetic")
    for _ in range(rng.choice((1, 1, 2))):
        problem = rng.choices([p for p, _ in PROBLEMS], [w for _, w in PROBLEMS])[0]
        text, steps, total = problem(rng, split)
        chat.ask(text, " ".join(steps) + f"\nanswer: {total}", Check("answer", total))
        if total > 0 and rng.random() < 0.4:
            _follow_up(rng, split, chat, total)
    return chat
