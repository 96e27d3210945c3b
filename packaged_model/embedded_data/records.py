"""JSON from a text or from nothing: the keys that were asked for, short values, and then an end.

A request names the keys, gives a schema, or shows an example. Facts come from a sentence or two; without
one the values are made up.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import Check, Choices, Conversation, Split, join_words, line_list, pick, wording
from .tool_catalogue import SLOTS
from .words import things

Record = dict[str, Any]


@dataclass(frozen=True)
class Topic:
    """A kind of record: the slot of each key, and texts that state them."""

    keys: dict[str, str]
    texts: Choices[str]


def _between(low: int, high: int) -> Callable[[random.Random, Split], int]:
    return lambda rng, split: rng.randint(low, high)


FIELDS: dict[str, Callable[[random.Random, Split], Any]] = {
    **SLOTS,
    "age": _between(3, 99),
    "price": _between(1, 999),
    "count": _between(2, 60),
    "pages": _between(20, 900),
    "year": _between(1900, 2039),
    "guests": _between(2, 300),
    "goals": _between(0, 9),
    "rooms": _between(1, 12),
    "items": lambda rng, split: things(rng, split, rng.randint(2, 4)),
}
TOPICS = (
    Topic(
        {"name": "full", "age": "age", "town": "town", "job": "job"},
        line_list("""
            {name} is {age} years old, lives in {town} and [works as|is] a {job}.
            {name} from {town} is {age} and [has a job|earns a living|works] as a {job}.
            [The|Our|A] {job} {name} is {age}, and [comes from|lives in|was born in] {town}.
            [In|At home in] {town}, {name} works as a {job}[ at the age of|, aged] {age}.
        """),
    ),
    Topic(
        {"product": "thing", "price": "price", "color": "color", "count": "count"},
        line_list("""
            [We sold|They bought|She ordered] {count} times the {color} {product} [for|at] {price} each.
            The {product} is {color} and costs {price}; there are {count} [left|of it|in stock].
            [Order|Invoice]: {count} x {product}, {color}, price {price}.
            A {color} {product} [for|costs] {price}, [and we have|of which there are|in stock:] {count}.
        """),
    ),
    Topic(
        {"title": "title", "author": "full", "pages": "pages", "year": "year"},
        line_list("""
            {author} wrote {title} in {year}; it has {pages} pages.
            The book {title} by {author} [came out in|is from|appeared in] {year} and has {pages} pages.
            [In {year}|Back in {year}], {author} published {title}, [a book of|which has|with] {pages} pages.
        """),
    ),
    Topic(
        {"event": "title", "date": "date", "place": "town", "guests": "guests"},
        line_list("""
            {event} is on {date} in {place}, with {guests} guests.
            [We expect|There will be] {guests} guests at {event} in {place} on {date}.
            On {date}, {place} [hosts|has|welcomes] {event} for {guests} guests.
        """),
    ),
    Topic(
        {"town": "town", "sky": "color", "degrees": "k"},
        line_list("""
            In {town} the sky is {sky} and it is {degrees} degrees[| warm].
            [It is|They have] {degrees} degrees in {town}, and the sky is {sky}.
            {town}: {degrees} degrees, {sky} sky.
        """),
    ),
    Topic(
        {"email": "email", "name": "name", "code": "code"},
        line_list("""
            {name} asks about order {code}; [write|answer|reply] to {email}.
            [Order|Number] {code} is from {name} ({email}).
            Please [tell|inform] {name} at {email} about {code}.
        """),
    ),
    Topic(
        {"team": "town", "goals": "goals", "sport": "sport"},
        line_list("""
            {team} made {goals} [goals|points] in {sport}.
            In {sport}, {team} [scored|got|has] {goals} [goals|points].
            [The team of|The club of] {team} plays {sport} and [made|won] {goals} [goals|points].
        """),
    ),
    Topic(
        {"owner": "name", "items": "items"},
        line_list("""
            {owner} has {items}.
            [In the bag of|On the table of|In the room of] {owner} are {items}.
            {owner} [bought|packed|found|lost] {items}.
        """),
    ),
    Topic(
        {"flat": "code", "rooms": "rooms", "town": "town", "price": "price"},
        line_list("""
            Flat {flat} in {town} has {rooms} rooms and costs {price} a month.
            [For rent|To let] in {town}: flat {flat}, {rooms} rooms, {price}.
            [A flat|One flat] of {rooms} rooms in {town}, number {flat}, [rent|price] {price}.
        """),
    ),
    Topic(
        {"start": "time", "minutes": "minutes", "room": "room", "person": "name"},
        line_list("""
            {person} [meets us|waits|speaks] in the {room} at {start} for {minutes} minutes.
            [At|From] {start}, {person} [needs|uses|has] the {room} for {minutes} minutes.
            The {room} is [taken|booked] at {start} by {person}, for {minutes} minutes.
        """),
    ),
)
ASK_TEXT = line_list("""
    @do [extract|find|get|take|return] {keys} from [this|the] text as JSON: {text}
    @do [write|give me|return|make] [JSON|a JSON object] with {keys} [for|from|of]: {text}
    {text} [Give|Write|Return|Show] {keys} as JSON.
    {text} [What are|Which are] {keys}? [Answer|Reply] [in|with] JSON.
    [JSON with|As JSON, with] {keys}: {text}
""")
ASK_SCHEMA = line_list("""
    {text} [Answer|Reply] with JSON [for|of|that matches] this schema: {schema}
    @do [fill|use|follow] this schema: {schema} [The text|Text]: {text}
    [Schema|JSON schema]: {schema} [Text|Input]: {text}
    @do [extract|return|write] JSON for the schema {schema} from: {text}
""")
ASK_EXAMPLE = line_list("""
    @do [write|answer|return|give me] JSON like {example} for: {text}
    {text} [Answer|Reply|Write it] in this form: {example}
    [Example|For example|A sample]: {example} Now [this|do this|for this]: {text}
    @do [follow|use] the example {example} for this text: {text}
""")
ASK_NEW = line_list("""
    @do [make|invent|make up|create|write|give me] a [record|JSON object|JSON record|JSON] with {keys}.
    @do [make|invent|make up|create|write|give me] [any|some|an example of a] JSON object with {keys}.
    [A|One|Some] [random|made-up] JSON object with {keys}[, please|].
    [JSON with|A JSON with] {keys}, [made up|invented|any values].
""")
AGAIN = line_list("""
    [Only|Just] {keys}[|, please].
    [Now|And now|Next] only {keys}.
    @do [write|give me|show|return] [only|just] {keys}.
""")


def schema_of(record: Record) -> dict[str, Any]:
    """The JSON schema of a record with these keys and values of these types."""
    kinds = {str: "string", int: "integer", bool: "boolean"}
    properties = {
        key: {"type": "array", "items": {"type": "string"}}
        if isinstance(value, list)
        else {"type": kinds[type(value)]}
        for key, value in record.items()
    }
    return {"type": "object", "properties": properties, "required": list(record)}


def _values(rng: random.Random, split: Split, topic: Topic) -> Record:
    return {key: FIELDS[slot](rng, split) for key, slot in topic.keys.items()}


def _stated(topic: Topic, rng: random.Random, split: Split, values: Record) -> str:
    shown = {k: join_words(v) if isinstance(v, list) else v for k, v in values.items()}
    return pick(rng, split, topic.texts).format(**shown)


def _chosen(rng: random.Random, record: Record) -> Record:
    keys = rng.sample(list(record), rng.randint(1, len(record)))
    return {key: record[key] for key in keys}


def _named(rng: random.Random, record: Record) -> str:
    keys = join_words(list(record))
    if rng.random() < 0.4:
        return f"the {'key' if len(record) == 1 else 'keys'} {keys}"
    return f"{rng.choice(('', 'the '))}{keys}"


def extract(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Take facts from a text, by names of keys, a schema or an example; then perhaps fewer of them."""
    topic = rng.choice(TOPICS)
    values = _values(rng, split, topic)
    text, record = _stated(topic, rng, split, values), _chosen(rng, values)
    how = rng.random()
    if how < 0.45:
        asked = wording(rng, split, ASK_TEXT).format(keys=_named(rng, record), text=text)
    elif how < 0.75:
        asked = wording(rng, split, ASK_SCHEMA).format(schema=json.dumps(schema_of(record)), text=text)
    else:
        other = _values(rng, split, topic)
        example = json.dumps({key: other[key] for key in record})
        asked = wording(rng, split, ASK_EXAMPLE).format(example=example, text=text)
    chat.ask(asked, json.dumps(record), Check("json", record))
    if len(record) > 1 and rng.random() < 0.2:
        fewer = {key: record[key] for key in rng.sample(list(record), 1)}
        chat.ask(
            wording(rng, split, AGAIN).format(keys=_named(rng, fewer)),
            json.dumps(fewer),
            Check("json", fewer),
        )


def make_up(rng: random.Random, split: Split, chat: Conversation) -> None:
    """A record with made-up values."""
    topic = rng.choice(TOPICS)
    record = _chosen(rng, _values(rng, split, topic))
    kinds = {key: type(value).__name__ for key, value in record.items()}
    if rng.random() < 0.6:
        asked = wording(rng, split, ASK_NEW).format(keys=_named(rng, record))
    else:
        text = rng.choice(("Make something up.", "Invent the values.", "Any values will do."))
        asked = wording(rng, split, ASK_SCHEMA).format(schema=json.dumps(schema_of(record)), text=text)
    chat.ask(asked, json.dumps(record), Check("keys", kinds))


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """One or two records in one chat."""
    chat = Conversation("json")
    for _ in range(rng.choice((1, 1, 2))):
        rng.choices((extract, make_up), (3, 1))[0](rng, split, chat)
    return chat
