"""Tasks that judge: sentiment, topic, opposites, and what belongs to a category."""

from __future__ import annotations

import random

from .base import Check, Conversation, Split, article_for, line_list, pick, word_list
from .words import (
    CATEGORIES,
    OBJECTS,
    OPPOSITES,
    PLACES,
    person,
    town,
)

GOOD = word_list("wonderful lovely excellent great delightful superb charming perfect fantastic pleasant")
BAD = word_list("terrible awful boring horrible poor dreadful useless dull nasty disappointing")
REVIEWS = line_list("""
    The {thing} is {word}.
    What {a_word} {thing}!
    I think this {thing} is {word}.
    {name} said the {place} was {word}.
    My visit to the {place} was {word}.
    This {thing} turned out to be {word}.
    We had {a_word} time at the {place}.
""")
TOPICS = {
    "sports": [
        "The team won the match by {k} points.",
        "The player scored {k} goals.",
        "{name} ran {k} laps in the race.",
        "The coach of {town} praised the goalkeeper.",
    ],
    "food": [
        "The soup needs {k} carrots and salt.",
        "{name} baked {k} loaves of bread.",
        "The cook fried {k} eggs for breakfast.",
        "The pie was served with cream in {town}.",
    ],
    "weather": [
        "It rained for {k} days.",
        "Snow fell in {town} all night.",
        "The wind blew at {k} miles an hour.",
        "The forecast says sun for {town}.",
    ],
    "music": [
        "The band played {k} songs.",
        "{name} sang with the choir.",
        "The concert in {town} began with a violin.",
        "{name} practised the piano for {k} hours.",
    ],
    "travel": [
        "The train to {town} leaves at {k}.",
        "{name} booked a flight.",
        "We stayed {k} nights in a hotel.",
        "The bus tour through {town} took {k} hours.",
    ],
    "health": [
        "The doctor told {name} to rest.",
        "The nurse in {town} gave {k} vaccines.",
        "{name} took a pill for the fever.",
        "The hospital has {k} beds.",
    ],
}


ASK_MOOD = line_list("""
    Is this positive or negative?
    What is the sentiment?
    Classify the sentiment:
    Positive or negative?
    Is the mood of this text good or bad: positive or negative?
    Label it positive or negative.
""")
ASK_TOPIC = line_list("""
    What is the topic?
    Which topic is this?
    Classify the topic:
    Pick the topic
    Choose a topic:
""")
ASK_OPPOSITE = line_list("""
    What is the opposite of {x}?
    Give me the opposite of {x}.
    Opposite of {x}?
    Name the opposite of {x}.
    Which word means the opposite of {x}?
""")
ASK_MEMBER = line_list("""
    Does {x} belong to {c}?
    Is {x} one of the {c}?
    Are {c} the right group for {x}?
    Would you put {x} with the {c}?
    Does {x} count among {c}?
""")
WHY = ("Why?", "Why do you think so?", "How do you know?")


def _mood(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A request for the sentiment of a review, the label, and the reason."""
    label, words = rng.choice((("positive", GOOD), ("negative", BAD)))
    word = pick(rng, split, words)
    text = pick(rng, split, REVIEWS).format(
        word=word,
        a_word=article_for(word),
        thing=pick(rng, split, OBJECTS),
        name=person(rng, split)[0],
        place=pick(rng, split, PLACES),
    )
    return f"{pick(rng, split, ASK_MOOD)} {text}", label, f'The word "{word}" is {label}.'


def _topic(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A request for the topic of a sentence, the label, and the reason."""
    label = rng.choice(list(TOPICS))
    text = pick(rng, split, TOPICS[label]).format(
        k=rng.randint(2, 20), name=person(rng, split)[0], town=town(rng, split)
    )
    ask = f"{pick(rng, split, ASK_TOPIC)} ({', '.join(TOPICS)})"
    return f"{ask} {text}", label, f"The sentence is about {label}."


def classify(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Sentiment or topic of a sentence, with a reason when asked."""
    request, label, reason = rng.choice((_mood, _topic))(rng, split)
    chat.ask(request, label, Check("exact", label))
    if rng.random() < 0.25:
        chat.ask(rng.choice(WHY), reason, Check("facts", [label]))


def _opposite(rng: random.Random, split: Split, chat: Conversation) -> None:
    left, right = rng.sample(rng.choice(OPPOSITES), 2)
    request = pick(rng, split, ASK_OPPOSITE).format(x=left)
    chat.ask(request, f"The opposite of {left} is {right}.", Check("facts", [right]))


def _member(rng: random.Random, split: Split, chat: Conversation) -> None:
    (mine, members), (other, _) = rng.sample(list(CATEGORIES.items()), 2)
    thing, told = rng.choice(members), rng.choice((mine, other))
    fits = thing in CATEGORIES[told]
    reply = f"Yes, {thing} belongs to {told}." if fits else f"No, {thing} belongs to {mine}."
    request = pick(rng, split, ASK_MEMBER).format(x=thing, c=told)
    chat.ask(request, reply, Check("facts", ["Yes" if fits else "No"]))


def know(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Opposites, and whether something belongs to a category."""
    for _ in range(rng.choice((1, 2, 3))):
        rng.choice((_opposite, _member))(rng, split, chat)
