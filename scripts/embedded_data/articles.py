"""Synthetic articles and stories of 60 to 1,500 tokens with summaries that hold their key facts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from .base import Check, Conversation, Split, article_for, line_list, pick, sentence
from .story import story
from .words import (
    ADJECTIVES,
    ANIMALS,
    JOBS,
    MONTHS,
    OBJECTS,
    PLACES,
    SPORTS,
    WEEKDAYS,
    full_name,
    plural,
    surname,
    town,
)


@dataclass(frozen=True)
class Plot:
    """One kind of news: lead sentences, their summary, slots it must hold, and questions."""

    leads: tuple[str, ...]
    summary: str
    facts: tuple[str, ...]
    questions: tuple[tuple[str, str, str], ...]


def parse(text: str) -> list[Plot]:
    """The plots of a catalogue: ``-`` leads, ``=`` summary, ``!`` facts, ``?`` questions."""
    plots = []
    for block in text.strip().split("\n\n"):
        lines: dict[str, list[str]] = {mark: [] for mark in "-=!?"}
        for line in block.split("\n"):
            lines[line[0]].append(line[2:])
        asked = tuple(tuple(part.strip() for part in f"{line} | ".split(" | ")[:3]) for line in lines["?"])
        plots.append(Plot(tuple(lines["-"]), lines["="][0], tuple(lines["!"][0].split()), asked))
    return plots


PLOTS = parse((Path(__file__).parent / "plots.txt").read_text(encoding="utf-8"))
COMPANY_KINDS = ("Works", "and Sons", "Limited", "Brothers", "Group")
FILLERS = line_list("""
    The {job} {x} said: "This is {article_adj} day for {town}."
    Many visitors came from {town3} to see it.
    Last year there was a similar event in {town3}.
    {x}, who lives nearby, brought {k} {objects} for the others.
    The weather was {adj} and the streets were full.
    A group of {k} children sang in front of the {place2}.
    "We did not expect so many people," said {x}.
    The next meeting will be on a {weekday}.
    Some people sold {objects} next to the {place2}.
    {x} has worked as a {job2} for {k} years.
    Before that, the town was known mainly for its {objects}.
    Tickets cost {k} dollars at the {place2}.
    The road to {town3} was closed for {k} hours.
    Afterwards there was music and food for everyone.
    {x} and {y} took {k} photos for the local paper.
    Nobody could remember anything like it.
    In {month} the town will talk about it again.
    Even the {animals2} in the {place2} seemed {adj}.
    A {job2} from {town3} offered to help.
    "I will tell my children about this," said {y}, a {job2}.
    The old {place2} will be closed for {k} weeks.
    For many people in {town} this was the main topic of the week.
    {y} wrote a letter about the {objects} to the newspaper.
    The local school made {k} posters about it.
""")
ASK = line_list("""
    Summarize this article:
    Summarize the text below.
    Give me a short summary of this article:
    What is this article about?
    Please summarize:
    Write a summary of the following text.
    Can you sum this up in two sentences?
    What are the main points of this text?
    Shorten this article:
    TL;DR of this, please:
    Read this and give me the key facts.
""")
TITLES = line_list("""
    Give it a title.
    What would be a good headline?
    Suggest a title.
    Now write a headline for it.
    Can you find a title for it?
""")
# Filler sentences after the lead: mostly few, so that most of the training budget goes to replies.
LENGTHS = (1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 6, 6, 8, 12, 16, 40)
STORY_ASK = line_list("""
    Tell me a story about {a} {animal}.
    Write a short story about {a} {animal}.
    Can you tell a story with {a} {animal}?
    I would like a story about {a} {animal} named {name}.
    Tell me a tale of {a} {animal} called {name}.
    Please write a story for children about {a} {animal}.
""")


def _slots(rng: random.Random, split: Split) -> dict[str, str]:
    animal = pick(rng, split, ANIMALS)
    m = rng.randint(0, 5)
    return {
        "who": full_name(rng, split),
        "town": town(rng, split),
        "town2": town(rng, split),
        "place": pick(rng, split, PLACES),
        "job": pick(rng, split, JOBS),
        "sport": pick(rng, split, SPORTS),
        "n": str(m + rng.randint(1, 90)),
        "m": str(m),
        "day": f"{rng.choice(MONTHS)} {rng.randint(1, 28)}" if rng.random() < 0.6 else rng.choice(WEEKDAYS),
        "animal": animal,
        "article_animal": article_for(f"young {animal}"),
        "animals": plural(animal),
        "things": plural(pick(rng, split, OBJECTS)),
        "company": f"{surname(rng, split)} {rng.choice(COMPANY_KINDS)}",
    }


def _filler(rng: random.Random, split: Split, home: str) -> str:
    adj = pick(rng, split, ADJECTIVES)
    return sentence(
        pick(rng, split, FILLERS).format(
            x=full_name(rng, split),
            y=full_name(rng, split),
            town=home,
            town3=town(rng, split),
            adj=adj,
            article_adj=article_for(adj),
            job=pick(rng, split, JOBS),
            job2=pick(rng, split, JOBS),
            k=rng.randint(2, 40),
            objects=plural(pick(rng, split, OBJECTS)),
            place2=pick(rng, split, PLACES),
            weekday=rng.choice(WEEKDAYS),
            month=rng.choice(MONTHS),
            animals2=plural(pick(rng, split, ANIMALS)),
        )
    )


def article(rng: random.Random, split: Split, length: int) -> tuple[str, Plot, dict[str, str]]:
    """An article of a lead and ``length`` filler sentences, with its plot and facts."""
    plot, slots = rng.choice(PLOTS), _slots(rng, split)
    sentences = [sentence(pick(rng, split, plot.leads).format(**slots))]
    sentences += [_filler(rng, split, slots["town"]) for _ in range(length)]
    paragraphs, at = [], 0
    while at < len(sentences):
        size = rng.randint(2, 5)
        paragraphs.append(" ".join(sentences[at : at + size]))
        at += size
    return "\n\n".join(paragraphs), plot, slots


def _title(plot: Plot, slots: dict[str, str]) -> str:
    return f"News from {slots['town']}: " + plot.summary.format(**slots).split(". ")[0].rstrip(".")


def _article_chat(rng: random.Random, split: Split) -> Conversation:
    chat = Conversation("articles")
    text, plot, slots = article(rng, split, rng.choice(LENGTHS))
    ask = pick(rng, split, ASK)
    user = f"{text}\n\n{ask}" if rng.random() < 0.3 else f"{ask}\n\n{text}"
    chat.ask(
        user, sentence(plot.summary.format(**slots)), Check("facts", [slots[name] for name in plot.facts])
    )
    for question, reply, fact in rng.sample(plot.questions, rng.choice((0, 1, 2, 3))):
        check = Check("facts", [slots[fact] if fact else "nobody"])
        chat.ask(question, sentence(reply.format(**slots)), check)
    if rng.random() < 0.2:
        chat.ask(pick(rng, split, TITLES), _title(plot, slots), Check("facts", [slots["town"]]))
    return chat


def _story_chat(rng: random.Random, split: Split) -> Conversation:
    chat = Conversation("articles")
    animal, name = pick(rng, split, ANIMALS), surname(rng, split)
    ask = pick(rng, split, STORY_ASK)
    text, facts = story(rng, split, animal, name)
    user = ask.format(a=article_for(animal).split()[0], animal=animal, name=name)
    chat.ask(user, text, Check("facts", [animal] + ([name] if "{name}" in ask else [])))
    questions = [
        ("Who is the story about?", f"It is about {name}, {article_for(animal)}.", name),
        ("Where did it happen?", f"It happened in the {facts['place']}.", facts["place"]),
        ("What did they find?", f"They found {article_for(facts['object'])}.", facts["object"]),
        ("Who was the friend?", f"The friend was {facts['friend']}.", facts["friend"]),
    ]
    for question, reply, fact in rng.sample(questions, rng.choice((0, 1, 2))):
        chat.ask(question, reply, Check("facts", [fact]))
    return chat


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """An article with its summary and questions about it, or a short story."""
    return _story_chat(rng, split) if rng.random() < 0.3 else _article_chat(rng, split)
