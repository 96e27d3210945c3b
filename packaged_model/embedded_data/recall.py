"""Copying and looking up: repeat some words, or find who has what among several facts.

Nearly every other family copies names and things from its prompt. These chats are dense in copies, so that a
small model learns to copy any word early, and not only the words it has often seen.
"""

from __future__ import annotations

import random
import string

from .base import Check, Conversation, Split, article_for, join_words, line_list, pick, sentence, wording
from .words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    COLORS,
    GIRLS,
    JOBS,
    NOUNS,
    OBJECTS,
    PLACES,
    SPORTS,
    filler,
    full_name,
    invent,
    person,
    plural,
    surname,
    town,
)

REPEAT = line_list("""
    [Repeat|Repeat after me|Copy this|Echo|Say this back to me|Write this again|Type this again|Say]: {x}
    @do [repeat|copy|echo|write|type|say] [these words|this text|the following|this|exactly this]: {x}
    @do [repeat|copy|write|type] [these words|this text|the following|this] [once more|again|word for \
        word|unchanged]: {x}
""")
ONCE_MORE = line_list("""
    [Again|Once more|One more time|And again|And once more][.|, please.|!]
    @do [repeat|say|write|type|copy] it [again|once more|one more time].
""")
# (a fact, a question about its first slot, a question about its second slot)
FACTS: list[tuple[str, str, str]] = [
    ("{a} lives in {town}.", "Where does {a} live?", "Who lives in {town}?"),
    ("{a} has {thing}.", "What does {a} have?", "Who has {thing}?"),
    ("{a} likes {likes}.", "What does {a} like?", "Who likes {likes}?"),
    ("{a} owns {pet}.", "Which animal does {a} own?", "Who owns {pet}?"),
    ("{a} works as {job}.", "What is the job of {a}?", "Who works as {job}?"),
    ("{a} is in the {place}.", "Where is {a}?", "Who is in the {place}?"),
    ("{a} plays {sport}.", "What does {a} play?", "Who plays {sport}?"),
    ("{a} is {number} years old.", "How old is {a}?", "Who is {number} years old?"),
    ("{a} knows {other}.", "Whom does {a} know?", "Who knows {other}?"),
]
PLEASE = ("{q}", "{q}", "{q}", "Tell me: {q}", "And {q}", "Now: {q}")


def _code(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(2, 5)))


def _word(rng: random.Random, split: Split) -> str:
    choice = rng.random()
    if choice < 0.2:
        return surname(rng, split) if choice < 0.1 else town(rng, split)
    if choice < 0.3:
        return invent(rng, split)
    if choice < 0.4:
        return str(rng.randint(0, 999)) if choice < 0.35 else _code(rng)
    word = pick(
        rng,
        split,
        rng.choice((OBJECTS, ANIMALS, ADJECTIVES, COLORS, JOBS, PLACES, SPORTS, NOUNS, GIRLS, BOYS)),
    )
    return word.upper() if choice > 0.95 else plural(word) if choice > 0.85 else word


def repeat(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Copy a run of unrelated words, perhaps more than once."""
    words = [_word(rng, split) for _ in range(rng.choice((2, 4, 6, 8, 12, 16, 24)))]
    text = rng.choice((" ", ", ", " ", "; ", "\n")).join(words)
    chat.ask(wording(rng, split, REPEAT).format(x=text), text, Check("exact", text))
    if rng.random() < 0.3:
        chat.ask(wording(rng, split, ONCE_MORE), text, Check("exact", text))


def _slots(rng: random.Random, split: Split) -> dict[str, str]:
    return {
        "a": rng.choice((person(rng, split)[0], surname(rng, split), full_name(rng, split))),
        "town": town(rng, split),
        "thing": article_for(f"{filler(rng, split, ADJECTIVES)} {filler(rng, split, OBJECTS)}"),
        "likes": plural(filler(rng, split, OBJECTS)),
        "pet": f"{article_for(filler(rng, split, ANIMALS))} named {surname(rng, split)}",
        "job": article_for(filler(rng, split, JOBS)),
        "place": filler(rng, split, PLACES),
        "sport": filler(rng, split, SPORTS),
        "number": str(rng.randint(2, 99)),
        "other": full_name(rng, split),
    }


def look_up(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Several facts about different people, then questions about some of them."""
    known: dict[str, tuple[str, str, str]] = {}
    told: set[str] = set()
    for _ in range(rng.choice((1, 2, 3, 4, 6))):
        slots = _slots(rng, split)
        fact, ask_second, ask_first = (part.format(**slots) for part in rng.choice(FACTS))
        if slots["a"] not in known and ask_first not in told:
            known[slots["a"]] = (fact, ask_second, ask_first)
            told.add(ask_first)
    facts = " ".join(fact for fact, _, _ in known.values())
    asked = rng.sample(sorted(known), min(len(known), rng.choice((1, 2, 3))))
    for turn, name in enumerate(asked):
        fact, ask_second, ask_first = known[name]
        question = rng.choice(PLEASE).format(q=rng.choice((ask_second, ask_first)))
        chat.ask(question if turn else f"{facts} {question}", fact, Check("exact", fact))
    if rng.random() < 0.2:
        names = join_words(list(known))
        chat.ask("Who is named here?", sentence(names) + ".", Check("facts", list(known)))


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """Copying, looking up, or one after the other."""
    chat = Conversation("recall")
    for _ in range(rng.choice((1, 1, 2))):
        (repeat if rng.random() < 0.5 else look_up)(rng, split, chat)
    return chat
