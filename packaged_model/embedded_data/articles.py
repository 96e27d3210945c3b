"""Synthetic articles and stories of 60 to 1,500 tokens with summaries that hold their key facts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from .base import Check, Choices, Conversation, Split, article_for, expand, line_list, pick, sentence, wording
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
    filler,
    full_name,
    plural,
    surname,
    town,
)


@dataclass(frozen=True)
class Plot:
    """One kind of news: lead sentences, their summary, slots it must hold, and questions."""

    leads: Choices[str]
    summary: str
    facts: tuple[str, ...]
    questions: tuple[tuple[Choices[str], str, str], ...]


COMMON = {
    "who": line_list("""
        [Who|Which person] is [named|mentioned] in [it|the article|the text]?
        [Who is it about|Who is the person|What is the name of the person|Which person is this about]?
        @do [name|give me|tell me] the [person|person in it|name of the person].
    """),
    "town": line_list("""
        [Where|In which town|In what town] [did it happen|was it|was this|did this happen]?
        [Which|What] town is it about?
        @do [name|give me|tell me] the [town|town in it|name of the town].
    """),
    "day": line_list("""
        [When|On which day|On what day] [did it happen|was it|was this|did this happen]?
        @do [name|give me|tell me] the [day|date|day it happened].
    """),
}
COMMON_REPLIES = {"who": "It names {who}.", "town": "It happened in {town}.", "day": "It was on {day}."}


def parse(text: str) -> list[Plot]:
    """The plots of a catalogue: ``-`` leads, ``=`` summary, ``!`` facts, ``?`` questions."""
    plots = []
    for block in text.strip().split("\n\n"):
        lines: dict[str, list[str]] = {mark: [] for mark in "-=!?"}
        for line in block.split("\n"):
            lines[line[0]].append(line[2:])
        asked = [f"{line} | ".split(" | ")[:3] for line in lines["?"]]
        facts = tuple(lines["!"][0].split())
        shared = [(COMMON[name], reply, name) for name, reply in COMMON_REPLIES.items() if name in facts]
        own = [(Choices([expand(question)]), reply.strip(), fact.strip()) for question, reply, fact in asked]
        plots.append(Plot(Choices(map(expand, lines["-"])), lines["="][0], facts, (*shared, *own)))
    return plots


PLOTS = parse((Path(__file__).parent / "plots.txt").read_text(encoding="utf-8"))
COMPANY_KINDS = ("Works", "and Sons", "Limited", "Brothers", "Group")
FILLERS = line_list("""
    The {job} {x} [said|added|remarked|told us]: "This is {article_adj} day for {town}."
    Many [visitors|guests|people|tourists] came from {town3} to see [it|this].
    Last [year|month|week] there was a similar event in {town3}.
    {x}, who lives [nearby|around the corner|in {town3}], brought {k} {objects} for the others.
    The weather was {adj} and the [streets|shops|squares] were full.
    A group of {k} [children|students|pupils|neighbors] [sang|waited|danced] in front of the {place2}.
    "We did not expect so many people," [said|admitted|remarked] {x}.
    The next [meeting|event|party] will be on a {weekday}.
    [Some people|A few visitors|Two neighbors] sold {objects} next to the {place2}.
    {x} has worked as a {job2} for {k} years.
    [Before that|Until now|In the past], the town was known mainly for its {objects}.
    Tickets [cost|are sold for] {k} dollars at the {place2}.
    The road to {town3} was closed for {k} hours.
    [Afterwards|Later|In the evening] there was [music|food|tea|dancing] for everyone.
    {x} and {y} took {k} [photos|pictures] for the local paper.
    Nobody could remember anything like [it|this].
    In {month} the town will [talk|vote|decide] about it again.
    Even the {animals2} in the {place2} seemed {adj}.
    A {job2} from {town3} [offered|promised|wanted] to help.
    "I will tell my children about this," said {y}, a {job2}.
    The old {place2} will be [closed|open|used] for {k} weeks.
    For [many|most|some] people in {town} this was the main topic of the week.
    {y} wrote a letter about the {objects} to the newspaper.
    The local school made {k} [posters|drawings|flags] about it.
    {y} came with {k} {objects} and a {adj} {animal2}.
    [A|One] {adj} {animal2} [ran|walked|came] through the {place2} in the meantime.
""")
_TEXT = "[this article|the article|the text|this text|the following text|the following article|this news]"
ASK = line_list(f"""
    @do [summarize|sum up|shorten|give a summary of|write a summary of] {_TEXT}[:|.]
    @do [write|give me|make] a [short |brief |]summary of {_TEXT}[:|.]
    @do [sum up|summarize] {_TEXT} in [two sentences|a few words|short|one or two sentences]:
    What are the [main facts|key facts|main points|key points] of {_TEXT}?
    [What is|What's] {_TEXT} about?
    [TL;DR|Summary|Short summary|In short|A summary][:|, please:|?]
    @do [read|look at] {_TEXT} and [give me|tell me|write] the [key facts|main facts]:
""")
TITLES = line_list("""
    @do [give it|find|suggest|write|think of] a [title|headline|good title|heading][| for it].
    What [would be|is] a [good|fitting|short] [title|headline]?
    [And a|A|Now a] [title|headline|heading][?|, please.| for it?]
""")
# Filler sentences after the lead: mostly few, so that most of the training budget goes to replies.
LENGTHS = (0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 6, 6, 8, 12, 16, 24, 80)
STORY_ASK = line_list("""
    @do [tell me|write|make up|tell] a [short |little |]story about {a} {animal}.
    @do [tell me|write|make up|tell] a [short |little |]story about {a} {animal} [named|called] {name}.
    I [would like|want|need] a [short |]story [about|with] {a} {animal}[| named {name}| called {name}].
    @do [tell me|write] a [tale|fairy tale|bedtime story|story for children] [of|about|with] {a} \
        {animal}[| called {name}].
    A [story|tale|short story] [about|of|with] {a} {animal}[|, please].
""")
STORY_QUESTIONS: list[tuple[Choices[str], str, str]] = [
    (
        line_list("[Who|Which animal|What] is [the story|it|your story] [about|mainly about]?"),
        "It is about {name}, {a_animal}.",
        "name",
    ),
    (
        line_list("Where did [it|the story|this|all this] [happen|take place]?"),
        "It happened in the {place}.",
        "place",
    ),
    (line_list("What [did they find|was found|did they see|lay there]?"), "They found {a_object}.", "object"),
    (line_list("Who [was|is] the [friend|other one|second animal]?"), "The friend was {friend}.", "friend"),
    (
        line_list("What [is|was] the name of the [friend|other one]?"),
        "The friend was {friend}.",
        "friend",
    ),
]


def _slots(rng: random.Random, split: Split) -> dict[str, str]:
    animal = filler(rng, split, ANIMALS)
    m = rng.randint(0, 5)
    return {
        "who": full_name(rng, split),
        "town": town(rng, split),
        "town2": town(rng, split),
        "place": filler(rng, split, PLACES),
        "job": filler(rng, split, JOBS),
        "sport": filler(rng, split, SPORTS),
        "n": str(m + rng.randint(1, 90)),
        "m": str(m),
        "day": f"{rng.choice(MONTHS)} {rng.randint(1, 28)}" if rng.random() < 0.6 else rng.choice(WEEKDAYS),
        "animal": animal,
        "article_animal": article_for(f"young {animal}"),
        "animals": plural(animal),
        "things": plural(filler(rng, split, OBJECTS)),
        "company": f"{surname(rng, split)} {rng.choice(COMPANY_KINDS)}",
    }


def _filler(rng: random.Random, split: Split, home: str) -> str:
    adj = filler(rng, split, ADJECTIVES)
    return sentence(
        pick(rng, split, FILLERS).format(
            x=full_name(rng, split),
            y=full_name(rng, split),
            town=home,
            town3=town(rng, split),
            adj=adj,
            article_adj=article_for(adj),
            job=filler(rng, split, JOBS),
            job2=filler(rng, split, JOBS),
            k=rng.randint(2, 40),
            objects=plural(filler(rng, split, OBJECTS)),
            place2=filler(rng, split, PLACES),
            weekday=rng.choice(WEEKDAYS),
            month=rng.choice(MONTHS),
            animal2=filler(rng, split, ANIMALS),
            animals2=plural(filler(rng, split, ANIMALS)),
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
    ask = wording(rng, split, ASK)
    user = f"{text}\n\n{ask}" if rng.random() < 0.3 else f"{ask}\n\n{text}"
    chat.ask(
        user, sentence(plot.summary.format(**slots)), Check("facts", [slots[name] for name in plot.facts])
    )
    for question, reply, fact in rng.sample(plot.questions, rng.choice((0, 1, 2, 3, 4))):
        check = Check("facts", [slots[fact] if fact else "nobody"])
        chat.ask(wording(rng, split, question), sentence(reply.format(**slots)), check)
    if rng.random() < 0.2:
        chat.ask(wording(rng, split, TITLES), _title(plot, slots), Check("facts", [slots["town"]]))
    return chat


def _story_chat(rng: random.Random, split: Split) -> Conversation:
    chat = Conversation("articles")
    animal, name = pick(rng, split, ANIMALS), surname(rng, split)
    ask = pick(rng, split, STORY_ASK)
    text, facts = story(rng, split, animal, name)
    user = ask.format(a=article_for(animal).split()[0], animal=animal, name=name)
    chat.ask(user, text, Check("facts", [animal] + ([name] if "{name}" in ask else [])))
    facts |= {"name": name, "a_animal": article_for(animal), "a_object": article_for(facts["object"])}
    for question, reply, fact in rng.sample(STORY_QUESTIONS, rng.choice((0, 1, 2, 3))):
        chat.ask(wording(rng, split, question), reply.format(**facts), Check("facts", [facts[fact]]))
    return chat


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """An article with its summary and questions about it, or a short story."""
    return _story_chat(rng, split) if rng.random() < 0.3 else _article_chat(rng, split)
