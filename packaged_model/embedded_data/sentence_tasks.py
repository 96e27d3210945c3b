"""Tasks on single sentences: letter case, copying, extraction, voice, tense and simpler words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from .base import Check, Conversation, Split, join_words, line_list, pick, sentence, wording
from .words import (
    ADJECTIVES,
    JOBS,
    OBJECTS,
    PLACES,
    SYNONYMS,
    VERBS,
    date,
    filler,
    full_name,
    person,
    plural,
    town,
)

SENTENCES = line_list("""
    [{name}|The {job}|My {job}] {past} the [{adj} |]{thing} [in {town}|in the {place}|on {date}|with {name2}].
    [The {job}|{name}|Our {job}] {past} {k} [{adj} |]{things}[| in {town}| on {date}].
    {name} and {name2} [met|sang|waited|slept|talked|worked] [at|in|near] the {place}.
    [A|The|That|One] {adj} {thing} [is|was|lay|stood] in the {place}[| of {town}].
    {name} will [visit|leave|see|reach] {town} [on {date}|with {name2}|soon].
    The {place} in {town} [opens|opened|closes|closed] on {date}.
    [My|Our|The|Her] {job} [lives|works|was born|grew up] in {town}.
    {name} paid {k} dollars for [the|a|that] [{adj} |]{thing}.
""")
_THIS = "[this|this text|the text|this sentence|the following]"
CASES: list[tuple[Sequence[str], Callable[[str], str]]] = [
    (
        line_list(f"""
            @do [write|put|make|turn|convert|change] {_THIS} [in|into|to] [upper case|capital \
                letters|capitals|uppercase]
            @do [uppercase|capitalize every letter of] {_THIS}
        """),
        str.upper,
    ),
    (
        line_list(f"""
            @do [write|put|make|turn|convert|change] {_THIS} [in|into|to] [lower case|small letters|lowercase]
            @do [lowercase|use only small letters in] {_THIS}
        """),
        str.lower,
    ),
    (
        line_list(f"""
            @do [repeat|copy|echo|write exactly|say exactly|type exactly] {_THIS}
            @do [repeat|say|write|type] {_THIS} [again|once more|back to me|word for word]
        """),
        str,
    ),
    (
        line_list(f"""
            @do [put|write|set] {_THIS} [in|into|inside|between] [quotes|quotation marks|double quotes]
            @do [add|put] [quotes|quotation marks|double quotes] [to|around] {_THIS}
            @do quote {_THIS}
        """),
        lambda s: f'"{s}"',
    ),
]
EXTRACT_FROM = line_list("""
    {name} [paid|spent|won|got|lost|received|earned] {amount} dollars in {town} on {date}.
    On {date}, {name} [paid|spent|won|got|lost|received] {amount} dollars in {town}[| for a {thing}].
    [The bill|A bill|An amount|The price] of {amount} dollars was paid by {name} on {date} in {town}.
    In {town}, {name} [paid|spent|won|got|lost|received] {amount} dollars on {date}[| at the {place}].
    {name} [sent|gave|paid|owed] {amount} dollars to a {job} in {town} on {date}.
    {amount} dollars were [given|sent|paid|lent|handed] to {name} in {town} on {date}.
    {name} from {town} [won|paid|spent|got|earned] {amount} dollars on {date}.
    [The {job}|A {job}] in {town} [paid|gave|sent|lent] {name} {amount} dollars on {date}.
    [The {thing}|A {adj} {thing}] was bought in {town} on {date} by {name} for {amount} dollars.
""")
EXTRACT_ASK: dict[str, Sequence[str]] = {
    "name": line_list("""
        @do [extract|find|give me|tell me|write|name|pick out|say] [only |just |]the [name|name of the \
            person|person].
        What is the [name|name of the person|name in this sentence|name here]?
        [Who is in|Who is named in|Which name is in] [this sentence|the sentence|this text]?
    """),
    "date": line_list("""
        @do [extract|find|give me|tell me|write|name|pick out|say] [only |just |]the [date|day|date of it].
        What is the [date|date of this|date in this sentence|date here]?
        [When|On which date|On what day] [was it|was this|did it happen|did this happen]?
    """),
    "amount": line_list("""
        @do [extract|find|give me|tell me|write|name|pick out|say] [only |just |]the [amount|number of \
            dollars|sum].
        What is the [amount|number of dollars|sum of money|amount here]?
        How many dollars[| were there| was it| are named]?
    """),
    "town": line_list("""
        @do [extract|find|give me|tell me|write|name|pick out|say] [only |just |]the [town|place|name of \
            the town].
        What is the [town|place|name of the town|town in this sentence]?
        [Where|In which town|In what town] [was it|was this|did it happen|did this happen]?
    """),
}
AS_JSON = line_list("""
    @do [extract|write|give me|return|show|find] [the |]{x} [as|in] [JSON|a JSON object]
    [JSON|A JSON object|One JSON object] with [the |]{x}[|, please]
    @do [return|make|write|give me] [JSON|a JSON object] with [the |]{x}
    I [need|want|would like] [the |]{x} [as JSON|as a JSON object|in JSON]
""")


# (wordings of the request, the form that is shown, the form that is wanted)
REWRITES: list[tuple[Sequence[str], str, str]] = [
    (
        line_list(f"""
            @do [put|rewrite|change|turn|write] {_THIS} [in|into|to] [passive|the passive|the passive \
                voice|passive voice]
            @do [make this passive|use the passive|use the passive voice]
        """),
        "active",
        "passive",
    ),
    (
        line_list(f"""
            @do [put|rewrite|change|turn|write] {_THIS} [in|into|to] [active|the active|the active \
                voice|active voice]
            @do [make this active|use the active|use the active voice]
        """),
        "passive",
        "active",
    ),
    (
        line_list(f"""
            @do [put|rewrite|change|turn|write] {_THIS} [in|into|to] [the future|the future tense|future \
                tense]
            @do [make this about the future|use the future|use the future tense]
        """),
        "active",
        "future",
    ),
    (
        line_list(f"""
            @do [put|rewrite|change|turn|write] {_THIS} [in|into|to] [the past|the past tense|past tense]
            @do [make this about the past|use the past|use the past tense]
        """),
        "future",
        "active",
    ),
    (
        line_list(f"""
            @do [say|write|put|rewrite] {_THIS} in [simpler|easier|plain|simple|easy] words
            @do [simplify this|make this simpler|use simpler words|use easier words]
        """),
        "hard",
        "easy",
    ),
    (
        line_list(f"""
            @do [turn|change|make|rewrite|put] {_THIS} [into|to] [a question|a yes or no question]
            @do [ask this as a question|make this a question]
        """),
        "future",
        "question",
    ),
    (
        line_list(f"""
            @do [negate|deny] {_THIS}
            @do [make|turn|change|rewrite] {_THIS} [negative|into the negative|into its negation]
            @do [say|write] the [negation|negative] of {_THIS}
        """),
        "future",
        "negative",
    ),
]


def _sentence(rng: random.Random, split: Split) -> str:
    _, past, _ = pick(rng, split, VERBS)
    thing = filler(rng, split, OBJECTS)
    return sentence(
        pick(rng, split, SENTENCES).format(
            name=person(rng, split)[0],
            name2=person(rng, split)[0],
            past=past,
            adj=filler(rng, split, ADJECTIVES),
            thing=thing,
            things=plural(thing),
            k=rng.randint(2, 99),
            job=filler(rng, split, JOBS),
            place=filler(rng, split, PLACES),
            town=town(rng, split),
            date=date(rng),
        )
    )


def _about_it(ask: str) -> str:
    """The request once more, about the text that was just answered."""
    for this in (_THIS[1:-1]).split("|")[::-1]:
        ask = ask.replace(this, "it")
    return f"{ask}."


def change_case(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Upper case, lower case, copying and quoting of a sentence."""
    text = _sentence(rng, split)
    for turn in range(rng.choice((1, 1, 2, 3))):
        asks, change = rng.choice(CASES)
        ask = pick(rng, split, asks)
        if turn and rng.random() < 0.5:
            ask = _about_it(ask)
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
    shown = pick(rng, split, EXTRACT_FROM)
    text = sentence(
        shown.format(
            **facts,
            thing=filler(rng, split, OBJECTS),
            adj=filler(rng, split, ADJECTIVES),
            place=filler(rng, split, PLACES),
            job=filler(rng, split, JOBS),
        )
    )
    fields = rng.sample(list(facts), rng.randint(1, 4))
    if rng.random() < 0.4:
        want = {field: facts[field] for field in fields}
        ask = wording(rng, split, AS_JSON).format(x=join_words(fields))
        chat.ask(f"{ask}: {text}", json.dumps(want), Check("json", want))
        return
    for turn, field in enumerate(fields):
        ask = wording(rng, split, EXTRACT_ASK[field])
        chat.ask(ask if turn else f"{ask} {text}", facts[field], Check("exact", facts[field]))


def rewrite(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Passive and active voice, tense, and simpler words."""
    base, past, participle = pick(rng, split, VERBS)
    who, thing = person(rng, split)[0], filler(rng, split, OBJECTS)
    if rng.random() < 0.3:
        thing = f"{filler(rng, split, ADJECTIVES)} {thing}"
    hard, easy = pick(rng, split, SYNONYMS)
    forms = {
        "active": f"{who} {past} the {thing}.",
        "passive": f"The {thing} was {participle} by {who}.",
        "future": f"{who} will {base} the {thing}.",
        "question": f"Will {who} {base} the {thing}?",
        "negative": f"{who} will not {base} the {thing}.",
        "hard": f"{who} wants to {hard} the {thing}.",
        "easy": f"{who} wants to {easy} the {thing}.",
    }
    asks, shown, wanted = rng.choice(REWRITES)
    chat.ask(f"{pick(rng, split, asks)}: {forms[shown]}", forms[wanted], Check("exact", forms[wanted]))
