"""Short stories put together from sentences with a shared hero, friend, place and object."""

from __future__ import annotations

import random

from .base import Split, article_for, line_list, pick
from .words import ADJECTIVES, ANIMALS, OBJECTS, PLACES, surname

OPEN = line_list("""
    Once upon a time there was {a_adj} {animal} named {n}.
    There once was {a_adj} {animal}. Its name was {n}.
    {n} was {a_adj} {animal} who lived near the {place}.
    Long ago, {a_adj} {animal} called {n} lived by the {place}.
    In a small town lived {n}, {a_adj} {animal}.
""")
WALK = line_list("""
    One morning {n} went to the {place}.
    One day {n} walked to the {place} all alone.
    Every day {n} played in the {place}.
    On a sunny day {n} visited the {place}.
    When the rain stopped, {n} ran to the {place}.
""")
FIND = line_list("""
    There {n} found {a_object}.
    Next to a tree, {n} saw {a_object}.
    Under some leaves lay {a_object}.
    Suddenly {n} noticed {a_object} on the ground.
    In the middle of the {place} there was {a_object}.
""")
MEET = line_list("""
    Then {f} the {other} came by. "Is that yours?" asked {f}.
    "That is mine!" cried {f}, {a_other}.
    {f}, {a_other}, was looking for it and looked sad.
    A voice said: "I have lost my {object}." It was {f} the {other}.
    {f} the {other} asked: "Have you seen my {object}?"
""")
GIVE = line_list("""
    {n} gave the {object} to {f}. "Thank you," said {f}.
    "Here, take it," said {n}, and {f} was very glad.
    {n} thought for a moment and gave the {object} back.
    So they shared the {object} and played together.
    "You can have it," said {n}. {f} smiled.
""")
END = line_list("""
    From that day on, {n} and {f} were friends.
    They played until the sun went down.
    And they lived happily ever after.
    {n} went home and slept well that night.
    After that, they met at the {place} every day.
""")
MIDDLE = line_list("""
    It was {adj} and nobody else was there.
    {n} felt a little {adj}.
    The wind was {adj} and the sky was blue.
    "What a {adj} day," said {n}.
    {n} looked at it for a long time.
    {n} had never seen such a {adj} thing.
    A bird sang in a tree.
    {n} sat down and waited.
""")


def story(rng: random.Random, split: Split, animal: str, name: str) -> tuple[str, dict[str, str]]:
    """A story about the animal of that name, and the facts in it."""
    others = [other for other in ANIMALS if other != animal]
    other, thing, adj = pick(rng, split, others), pick(rng, split, OBJECTS), pick(rng, split, ADJECTIVES)
    slots = {
        "n": name,
        "animal": animal,
        "a_adj": article_for(adj),
        "adj": adj,
        "place": pick(rng, split, PLACES),
        "object": thing,
        "a_object": article_for(thing),
        "f": surname(rng, split),
        "other": other,
        "a_other": article_for(other),
    }
    parts: list[str] = []
    for templates in (OPEN, WALK, FIND, MEET, GIVE, END):
        parts.append(pick(rng, split, templates).format(**slots))
        if rng.random() < 0.3:
            parts.append(pick(rng, split, MIDDLE).format(**{**slots, "adj": pick(rng, split, ADJECTIVES)}))
    text = " ".join(parts[:4]) + "\n\n" + " ".join(parts[4:]) if rng.random() < 0.5 else " ".join(parts)
    return text, {"place": slots["place"], "object": thing, "friend": slots["f"]}
