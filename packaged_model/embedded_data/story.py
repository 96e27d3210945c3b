"""Short stories put together from sentences with a shared hero, friend, place and object."""

from __future__ import annotations

import random

from .base import Split, article_for, line_list, pick
from .words import ADJECTIVES, ANIMALS, OBJECTS, PLACES, filler, surname

OPEN = line_list("""
    [Once upon a time|Long ago|Many years ago|Once] there was {a_adj} {animal} [named|called] {n}.
    There [once was|was once|lived] {a_adj} {animal}. Its name was {n}.
    {n} was {a_adj} {animal} who lived [near|by|behind|close to] the {place}.
    [Long ago|Once|Some time ago], {a_adj} {animal} called {n} lived [by|near|behind] the {place}.
    In a [small|little|quiet] [town|village] lived {n}, {a_adj} {animal}.
""")
WALK = line_list("""
    [One morning|One day|One evening|On a sunny day|After breakfast] {n} [went|walked|ran] to the {place}.
    [Every day|Each morning|Every summer] {n} [played|slept|sang] in the {place}.
    On a [sunny|rainy|cold|warm] day {n} [visited|saw] the {place}.
    When the [rain|wind|snow] stopped, {n} [ran|went|hurried] to the {place}.
""")
FIND = line_list("""
    There {n} [found|saw|noticed|discovered] {a_object}.
    [Next to a tree|Behind a wall|Under a bench|Near the door], {n} [saw|found|noticed] {a_object}.
    [Under some leaves|In the grass|On a stone|Between two trees] lay {a_object}.
    Suddenly {n} [noticed|saw] {a_object} on the [ground|floor|grass].
    In the [middle|corner|shade] of the {place} there was {a_object}.
""")
MEET = line_list("""
    Then {f} the {other} [came by|appeared|arrived]. "Is that yours?" asked {f}.
    "That is mine!" [cried|said|shouted] {f}, {a_other}.
    {f}, {a_other}, was looking for it and looked [sad|worried|tired].
    A voice said: "I have lost my {object}." It was {f} the {other}.
    {f} the {other} asked: "Have you [seen|found] my {object}?"
""")
GIVE = line_list("""
    {n} gave the {object} to {f}. "Thank you," [said|cried|whispered] {f}.
    "Here, take it," said {n}, and {f} was very [glad|happy|thankful].
    {n} thought for a [moment|while] and gave the {object} back.
    So they shared the {object} and [played|sang|laughed] together.
    "You can have it," said {n}. {f} [smiled|laughed|nodded].
""")
END = line_list("""
    From that day on, {n} and {f} were [friends|best friends|good friends].
    They [played|talked|danced] until the sun went down.
    And they lived happily ever after.
    {n} went home and [slept|dreamed] well that night.
    After that, they met at the {place} every [day|week|morning].
""")
MIDDLE = line_list("""
    It was {adj} and nobody else was there.
    {n} felt [a little|very|quite|a bit] {adj}.
    The wind was {adj} and the sky was [blue|grey|clear].
    "What a {adj} [day|place|surprise]," said {n}.
    {n} looked at it for a long time.
    {n} had never seen such a {adj} thing.
    A [bird|cricket|frog] sang in a tree.
    {n} sat down and waited.
""")


def story(rng: random.Random, split: Split, animal: str, name: str) -> tuple[str, dict[str, str]]:
    """A story about the animal of that name, and the facts in it."""
    other = pick(rng, split, ANIMALS)
    while other == animal:
        other = pick(rng, split, ANIMALS)
    thing, adj = filler(rng, split, OBJECTS), filler(rng, split, ADJECTIVES)
    slots = {
        "n": name,
        "animal": animal,
        "a_adj": article_for(adj),
        "adj": adj,
        "place": filler(rng, split, PLACES),
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
            parts.append(pick(rng, split, MIDDLE).format(**{**slots, "adj": filler(rng, split, ADJECTIVES)}))
    text = " ".join(parts[:4]) + "\n\n" + " ".join(parts[4:]) if rng.random() < 0.5 else " ".join(parts)
    return text, {"place": slots["place"], "object": thing, "friend": slots["f"]}
