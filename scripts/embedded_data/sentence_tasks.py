"""Tasks on single sentences: letter case, copying, extraction, voice, tense and simpler words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from .base import Check, Conversation, Split, join_words, line_list, pick, sentence
from .words import (
    ADJECTIVES,
    JOBS,
    OBJECTS,
    PLACES,
    SYNONYMS,
    VERBS,
    date,
    full_name,
    person,
    plural,
    town,
)

SENTENCES = line_list("""
    {name} {past} the {adj} {thing} in {town}.
    The {job} {past} {k} {things}.
    {name} and {name2} met at the {place}.
    A {adj} {thing} is in the {place}.
    {name} will visit {town} on {date}.
    The {place} in {town} opens on {date}.
    My {job} lives in {town}.
    {name} paid {k} dollars for the {thing}.
""")
CASES: list[tuple[list[str], Callable[[str], str]]] = [
    (
        [
            "Write this in upper case",
            "Make this upper case",
            "Put this in capital letters",
            "Convert to upper case",
            "Uppercase this",
        ],
        str.upper,
    ),
    (
        [
            "Write this in lower case",
            "Make this lower case",
            "Put this in small letters",
            "Convert to lower case",
            "Lowercase this",
        ],
        str.lower,
    ),
    (["Repeat this", "Say this again", "Copy this text", "Repeat after me", "Write exactly this"], str),
    (
        [
            "Put this in quotes",
            "Quote this",
            "Add quotation marks to this",
            "Put quotation marks around this",
            "Write this in quotes",
        ],
        lambda s: f'"{s}"',
    ),
]
EXTRACT_FROM = line_list("""
    {name} paid {amount} dollars in {town} on {date}.
    On {date}, {name} spent {amount} dollars in {town}.
    The bill of {amount} dollars was paid by {name} on {date} in {town}.
    In {town}, {name} got {amount} dollars on {date}.
    {name} sent {amount} dollars to a shop in {town} on {date}.
    {amount} dollars were given to {name} in {town} on {date}.
    {name} from {town} won {amount} dollars on {date}.
""")
EXTRACT_ASK: dict[str, list[str]] = {
    "name": [
        "Who is in this sentence?",
        "Extract the name.",
        "What is the name of the person?",
        "Which person is named?",
        "Find the name.",
    ],
    "date": [
        "When was it?",
        "Extract the date.",
        "What is the date?",
        "Which date is given?",
        "Find the date.",
    ],
    "amount": [
        "How many dollars?",
        "Extract the amount.",
        "What is the amount?",
        "Which amount is given?",
        "Find the amount.",
    ],
    "town": [
        "Where was it?",
        "Extract the town.",
        "What is the town?",
        "Which town is named?",
        "Find the town.",
    ],
}


# (wordings of the request, the form that is shown, the form that is wanted)
REWRITES: list[tuple[list[str], str, str]] = [
    (
        line_list("""
            Make this passive
            Rewrite in the passive voice
            Put this in passive voice
            Change to passive
            Passive, please
        """),
        "active",
        "passive",
    ),
    (
        line_list("""
            Make this active
            Rewrite in the active voice
            Put this in active voice
            Change to active
            Active, please
        """),
        "passive",
        "active",
    ),
    (
        line_list("""
            Put this in the future
            Rewrite in the future tense
            Change to the future tense
            Use the future tense
            Make this about the future
        """),
        "active",
        "future",
    ),
    (
        line_list("""
            Put this in the past
            Rewrite in the past tense
            Change to the past tense
            Use the past tense
            Make this about the past
        """),
        "future",
        "active",
    ),
    (
        line_list("""
            Say this in simpler words
            Simplify this
            Make this simpler
            Use easier words
            Rewrite this in plain words
        """),
        "hard",
        "easy",
    ),
]


def _sentence(rng: random.Random, split: Split) -> str:
    _, past, _ = pick(rng, split, VERBS)
    thing = pick(rng, split, OBJECTS)
    return sentence(
        pick(rng, split, SENTENCES).format(
            name=person(rng, split)[0],
            name2=person(rng, split)[0],
            past=past,
            adj=pick(rng, split, ADJECTIVES),
            thing=thing,
            things=plural(thing),
            k=rng.randint(2, 99),
            job=pick(rng, split, JOBS),
            place=pick(rng, split, PLACES),
            town=town(rng, split),
            date=date(rng),
        )
    )


def change_case(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Upper case, lower case, copying and quoting of a sentence."""
    text = _sentence(rng, split)
    for turn in range(rng.choice((1, 1, 2, 3))):
        asks, change = rng.choice(CASES)
        ask = pick(rng, split, asks)
        if turn and rng.random() < 0.5:
            ask = f"Now {ask[0].lower()}{ask[1:].replace('this', 'it')}."
        else:
            text = _sentence(rng, split) if turn else text
            ask = f"{ask}: {text}"
        text = change(text)
        chat.ask(ask, text, Check("exact", text))


def extract(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Name, date, amount or town of a sentence, alone or as JSON."""
    facts = {
        "name": full_name(rng, split) if rng.random() < 0.5 else person(rng, split)[0],
        "date": date(rng),
        "amount": str(rng.randint(2, 999)),
        "town": town(rng, split),
    }
    text = pick(rng, split, EXTRACT_FROM).format(**facts)
    fields = rng.sample(list(facts), rng.randint(1, 4))
    if rng.random() < 0.3:
        want = {field: facts[field] for field in fields}
        asks = [
            "Extract {x} as JSON",
            "Give me {x} as a JSON object",
            "Write {x} as JSON",
            "Return JSON with {x}",
            "JSON with {x}",
        ]
        ask = pick(rng, split, asks).format(x=join_words(fields))
        chat.ask(f"{ask}: {text}", json.dumps(want), Check("json", want))
        return
    for turn, field in enumerate(fields):
        ask = pick(rng, split, EXTRACT_ASK[field])
        chat.ask(ask if turn else f"{ask} {text}", facts[field], Check("exact", facts[field]))


def rewrite(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Passive and active voice, tense, and simpler words."""
    base, past, participle = pick(rng, split, VERBS)
    who, thing = person(rng, split)[0], pick(rng, split, OBJECTS)
    hard, easy = pick(rng, split, SYNONYMS)
    forms = {
        "active": f"{who} {past} the {thing}.",
        "passive": f"The {thing} was {participle} by {who}.",
        "future": f"{who} will {base} the {thing}.",
        "hard": f"{who} wants to {hard} the {thing}.",
        "easy": f"{who} wants to {easy} the {thing}.",
    }
    asks, shown, wanted = rng.choice(REWRITES)
    chat.ask(f"{pick(rng, split, asks)}: {forms[shown]}", forms[wanted], Check("exact", forms[wanted]))
