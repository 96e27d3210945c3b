"""Grade-school word problems solved step by step, ending in ``answer: N``; and plain sums."""

from __future__ import annotations

import random
from collections.abc import Callable

from .base import Check, Conversation, Split, line_list, pick, sentence
from .words import CONTAINERS, OBJECTS, PLACES, SPORTS, count_of, person, plural

Problem = tuple[str, list[str], int]

GAIN = line_list("""
    {n} {verb_gets} {k} more.
    {n} buys {k} more {things}.
    Then {n} finds {k} {things}.
    A friend gives {n} {k} {things}.
    {n} gets {k} more from {friend}.
    {friend} gives {pro} {k} {things}.
    Later {n} picks up another {k}.
    {Sub} wins {k} {things} in a game.
    {Sub} collects {k} more {things}.
    {n} is given {k} extra {things}.
    After lunch {sub} adds {k} {things}.
    On {place} day {sub} earns {k} more.
    {Sub} then receives {k} {things} as a present.
    {n} takes {k} more {things} from the {place}.
    Next {sub} borrows {k} {things} from {friend}.
    {Poss} mother hands {pro} {k} more.
""")
LOSE = line_list("""
    {n} gives {k} {things} to {friend}.
    Then {sub} loses {k} of them.
    {Sub} sells {k} {things}.
    {n} drops {k} in the {place}.
    {k} of the {things} break.
    {Sub} uses {k} {things}.
    {friend} takes {k} of them.
    {n} throws away {k} {things}.
    {Sub} leaves {k} at the {place}.
    {n} hands out {k} {things}.
    Later {n} gives away {k}.
    {Sub} puts {k} {things} aside for {friend}.
    {k} {things} are stolen.
    {n} returns {k} of the {things}.
    {Sub} trades away {k} {things}.
    A dog runs off with {k} of the {things}.
""")
START = line_list("""
    {n} has {k} {things}.
    There are {k} {things} in the {place} and {n} owns all of them.
    {n} starts with {k} {things}.
    At first {n} has {k} {things}.
    {n} keeps {k} {things} in a box.
    In the morning {n} counts {k} {things}.
    {n} brings {k} {things} to the {place}.
    {n} owns {k} {things}.
    {n} bought {k} {things}.
    {n} begins the day with {k} {things}.
""")
HOW_MANY = line_list("""
    How many {things} does {n} have now?
    How many {things} are left with {n}?
    How many does {n} have in the end?
    How many {things} does {sub} have at the end?
    What number of {things} does {n} have now?
    So how many {things} does {n} have?
    Find how many {things} {n} has now.
    Can you work out how many {things} {n} has now?
    Tell me how many {things} {sub} has now.
    How many {things} in all does {n} have after this?
""")
DISTRACT = line_list("""
    The {place} is open until {d} o'clock.
    {friend} is {d} years old.
    It is a sunny day.
    There are {d} chairs in the {place}.
    The bus to the {place} is number {d}.
    {friend} likes {sport}.
    {n} is {d} years old.
    It takes {d} minutes to walk to the {place}.
    {friend} has {d} cousins.
    The {place} has {d} windows.
""")
GROUPS = line_list("""
    There are {a} {boxes} with {b} {things} in each. How many {things} are there in all?
    {n} has {a} {boxes}. Each one holds {b} {things}. How many {things} does {n} have?
    {n} packs {b} {things} into each of {a} {boxes}. How many {things} are packed?
    Each of the {a} {boxes} holds {b} {things}. How many {things} is that together?
    {n} buys {a} {boxes} of {things}, and every one contains {b}. How many {things} did {sub} buy?
    A shop has {a} {boxes} and puts {b} {things} in every one. Find the total number of {things}.
    If one {box} holds {b} {things}, how many {things} do {a} {boxes} hold?
    {n} fills {a} {boxes} with {b} {things} each. How many {things} does {sub} use?
""")
SHARE = line_list("""
    {n} shares {t} {things} equally among {a} friends. How many does each friend get?
    {t} {things} are split evenly into {a} {boxes}. How many {things} go in each {box}?
    {n} puts {t} {things} into {a} {boxes} so that each has the same number. How many are in each?
    {a} children divide {t} {things} equally. How many {things} does each child receive?
    There are {t} {things} for {a} people. If all get the same, how many does one person get?
    {n} has {t} {things} and {a} equal {boxes}. How many {things} fit in each {box}?
    {t} {things} must be shared fairly by {a} players. How many does one player get?
    {n} deals {t} {things} evenly to {a} people. How many does each one hold?
""")
MORE = line_list("""
    {n} has {a} {things}. {friend} has {b} more than {n}. How many {things} does {friend} have?
    {friend} has {b} {things} more than {n}, who has {a}. How many {things} does {friend} have?
    {n} found {a} {things} and {friend} found {b} more than that. How many {things} did {friend} find?
    {n} owns {a} {things}. {friend} owns {b} more. How many does {friend} own?
    If {n} has {a} {things} and {friend} has {b} more than {n}, how many has {friend}?
""")
FEWER = line_list("""
    {n} has {a} {things}. {friend} has {b} fewer than {n}. How many {things} does {friend} have?
    {friend} has {b} {things} fewer than {n}, who has {a}. How many {things} does {friend} have?
    {n} found {a} {things} and {friend} found {b} fewer than that. How many {things} did {friend} find?
    {n} owns {a} {things}. {friend} owns {b} fewer. How many does {friend} own?
    If {n} has {a} {things} and {friend} has {b} fewer than {n}, how many has {friend}?
""")
BOTH = line_list("""
    {n} has {a} {things} and {friend} has {b}. How many {things} do they have together?
    {n} finds {a} {things}. {friend} finds {b}. How many {things} did they find in total?
    In the {place} {n} counts {a} {things} and {friend} counts {b} others. How many {things} is that in all?
    {n} made {a} {things}, and {friend} made {b}. How many {things} were made altogether?
    There are {a} {things} on the table and {b} {things} on the floor. How many {things} are there?
    {n} sold {a} {things} on Monday and {b} on Tuesday. How many {things} did {sub} sell in both days?
""")
PRICE = line_list("""
    One {thing} costs {b} dollars. How much do {a} {things} cost?
    {n} buys {a} {things} for {b} dollars each. How much does {sub} pay?
    A {thing} is sold for {b} dollars. What do {a} of them cost?
    At the {place} every {thing} costs {b} dollars. {n} takes {a}. How many dollars does {sub} spend?
    How many dollars does {n} need for {a} {things} at {b} dollars each?
""")
CHANGE = line_list("""
    {n} has {a} dollars and buys a {thing} for {b} dollars. How many dollars are left?
    {n} pays for a {thing} that costs {b} dollars with {a} dollars. How much change does {sub} get?
    A {thing} costs {b} dollars. {n} has {a} dollars. How much money remains after buying it?
    {n} went to the {place} with {a} dollars and spent {b} on a {thing}. How many dollars are still there?
    With {a} dollars, {n} buys one {thing} at {b} dollars. What is left?
""")
SUMS = line_list("""
    What is {e}?
    {e} = ?
    Calculate {e}.
    How much is {e}?
    Compute {e}
    What does {e} equal?
    Please work out {e}.
    Can you tell me what {e} is?
    {e}
    Solve {e}.
    I need the result of {e}.
    Tell me {e}, please.
""")
REPLIES = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def _slots(rng: random.Random, split: Split) -> dict[str, str]:
    name, sub, poss = person(rng, split)
    friend = person(rng, split)[0]
    while friend == name:
        friend = person(rng, split)[0]
    thing, box = pick(rng, split, OBJECTS), pick(rng, split, CONTAINERS)
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
        "place": pick(rng, split, PLACES),
        "sport": pick(rng, split, SPORTS),
        "verb_gets": "gets",
    }


def _chain(rng: random.Random, split: Split) -> Problem:
    """A quantity that several events change, one after another."""
    slots = _slots(rng, split)
    total = rng.randint(3, 60)
    text = [pick(rng, split, START).format(k=total, **slots)]
    steps = [f"{slots['n']} starts with {count_of(total, slots['thing'])}."]
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        gains = total < 6 or (total < 120 and rng.random() < 0.5)
        k = rng.randint(2, 40) if gains else rng.randint(2, total - 1)
        text.append(pick(rng, split, GAIN if gains else LOSE).format(k=k, **slots))
        after = total + k if gains else total - k
        steps.append(f"{total} {'+' if gains else '-'} {k} = {after}.")
        total = after
    if rng.random() < 0.25:
        fact = pick(rng, split, DISTRACT).format(d=rng.randint(2, 20), **slots)
        text.insert(rng.randint(1, len(text)), fact)
    text.append(pick(rng, split, HOW_MANY).format(**slots))
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
    packed = pick(rng, split, GROUPS).rsplit(". ", 1)[0]
    if packed.endswith("?"):
        packed = "{n} has {a} {boxes} with {b} {things} in each"
    event = pick(rng, split, GAIN if gains else LOSE).format(k=k, **slots)
    question = pick(rng, split, HOW_MANY).format(**slots)
    steps = [f"{a} * {b} = {made}.", f"{made} {'+' if gains else '-'} {k} = {total}."]
    return f"{packed.format(a=a, b=b, **slots)}. {event} {question}", steps, total


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
    return rng.randint(2, 12), rng.randint(2, 12)


PROBLEMS: list[tuple[Callable[[random.Random, Split], Problem], float]] = [
    (_chain, 5),
    (_two_step, 1.5),
    (_simple(GROUPS, "*", _times_numbers), 1),
    (_simple(SHARE, "/", _share_numbers), 1),
    (_simple(MORE, "+", _sum_numbers), 0.8),
    (_simple(FEWER, "-", _larger_first), 0.8),
    (_simple(BOTH, "+", _sum_numbers), 1),
    (_simple(PRICE, "*", _times_numbers), 0.8),
    (_simple(CHANGE, "-", _larger_first), 0.8),
]
FOLLOW_MORE = line_list("""
    What if {k} more are added?
    And if we add {k}?
    Now add {k} to that.
    Add {k} more, please.
    And {k} more?
    Plus {k}?
    What do we get with {k} more?
""")
FOLLOW_LESS = line_list("""
    What if {k} are taken away?
    And if we subtract {k}?
    Now take {k} from that.
    Take away {k}, please.
    And {k} fewer?
    Minus {k}?
    What do we get with {k} less?
""")


def _follow_up(rng: random.Random, split: Split, chat: Conversation, total: int) -> int:
    """One turn that changes the last answer."""
    adds = total < 5 or rng.random() < 0.5
    k = rng.randint(1, 20) if adds else rng.randint(1, total - 1)
    after = total + k if adds else total - k
    text = pick(rng, split, FOLLOW_MORE if adds else FOLLOW_LESS).format(k=k)
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
        chat.ask(pick(rng, split, SUMS).format(e=f"{a} {written} {b}"), reply, Check("number", total))
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
