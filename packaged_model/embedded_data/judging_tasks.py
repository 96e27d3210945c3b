"""Tasks that judge: sentiment, topic, opposites, and what belongs to a category."""

from __future__ import annotations

import random

from .base import Check, Conversation, Split, article_for, line_list, pick, word_list, wording
from .words import (
    CATEGORIES,
    OBJECTS,
    OPPOSITES,
    PLACES,
    WEEKDAYS,
    filler,
    person,
    town,
)

GOOD = word_list("""
    wonderful lovely excellent great delightful superb charming perfect fantastic pleasant amazing
    awesome beautiful
    brilliant fabulous fine good gorgeous magnificent marvelous nice outstanding splendid terrific
    enjoyable impressive
""")
BAD = word_list("""
    terrible awful boring horrible poor dreadful useless dull nasty disappointing bad appalling dismal
    disgusting lousy
    miserable unpleasant pathetic rotten shoddy tedious ugly unbearable worthless annoying mediocre
""")
REVIEWS = line_list("""
    [The|This|That|My new|Our] {thing} [is|was|looks|seems] [{word}|very {word}|really {word}|so {word}].
    What {a_word} {thing}[!|.| that is!]
    [I|We|They] [think|find|say|believe] [this|the|that] {thing} is {word}.
    {name} said the [{place}|{thing}|visit to the {place}] was {word}.
    [My|Our|The] [visit to|day at|evening at|trip to] the {place} was {word}.
    [This|The|That] {thing} [turned out to be|proved to be|was simply] {word}.
    [We|I|They] had {a_word} [time|day|evening|morning] at the {place}.
    {name} [bought|got|tried] [the|a|this] {thing}, and it was {word}.
""")
TOPICS = {
    "sports": line_list("""
        [The team|{name}|The team of {town}] won the [match|game|final|cup] [by {k} points|on {day}|in \
            {town}].
        [The player|{name}|The striker] [scored|made|shot] {k} [goals|points].
        {name} [ran|swam|finished] {k} laps in the [race|contest].
        [The coach|The trainer|The captain] of {town} [praised|thanked|criticized] the \
            [goalkeeper|players|team].
        [The referee|The coach] [stopped|started|ended] the [match|game|race] [after {k} minutes|in {town}].
    """),
    "food": line_list("""
        The [soup|sauce|stew|salad] needs {k} [carrots|tomatoes|onions] and [salt|pepper|butter].
        {name} [baked|sliced|ate|sold] {k} [loaves of bread|pancakes|cakes|pizzas].
        [The cook|The chef|{name}] [fried|boiled|served] {k} eggs for [breakfast|lunch|dinner].
        The [pie|cake|soup|meal] was served with [cream|cheese|rice] in {town}.
        [Stir|Boil|Cook|Bake] the [rice|dough|pasta|sauce] for {k} minutes.
    """),
    "weather": line_list("""
        It [rained|snowed|stormed|was foggy] for {k} [days|hours][| in {town}].
        [Snow|Rain|Hail|Sleet] fell in {town} [all night|all day|on {day}].
        The wind [blew|rose] [at|to] {k} miles an hour[| in {town}].
        The forecast [says|promises|shows] [sun|rain|snow|clouds|storms] for {town}.
        [A storm|A cold front|Thick fog|Frost] [reached|is coming to|covered] {town}[| on {day}].
    """),
    "music": line_list("""
        The [band|orchestra|choir] [played|performed|recorded] {k} songs[| in {town}].
        {name} [sang|performs] with the [choir|band|orchestra][| of {town}].
        The concert in {town} [began|ended] with [a violin|a drum solo|a song|a piano].
        {name} practised the [piano|violin|guitar|flute|cello] for {k} hours.
        {name} [wrote|sang|recorded] {k} [songs|melodies|tunes].
    """),
    "travel": line_list("""
        The [train|ferry|plane|coach] to {town} leaves at {k}.
        {name} booked [a flight|a cruise|a hotel room|a train ticket][| to {town}].
        [We|They|{name}] stayed {k} nights in a [hotel|hostel|guest house][| in {town}].
        The [bus tour|boat trip|guided tour] through {town} took {k} [hours|days].
        [The tourists|The passengers] [arrived in|left|toured] {town} [on {day}|after {k} hours].
    """),
    "health": line_list("""
        The doctor told {name} to [rest|drink more water|stay in bed|sleep more].
        The [nurse|doctor] in {town} gave {k} [vaccines|patients a pill|check-ups].
        {name} took [a pill|medicine|some syrup] for the [fever|cough|headache|flu].
        The [hospital|clinic][| in {town}] has {k} [beds|patients|nurses].
        {name} [has|had] [a fever|the flu|a sore throat|a broken arm] for {k} days.
    """),
}
_TEXT = "[this|this text|the text|this sentence|the sentence|the following]"
ASK_MOOD = line_list(f"""
    [Is|Would you say] {_TEXT} [is |]positive or negative?
    [What is|Which is|Is] the [sentiment|mood] of {_TEXT}[:|,] positive or negative?
    @do [classify|label|mark|rate] {_TEXT} as positive or negative:
    @do [tell me|say|decide] [if|whether] {_TEXT} is positive or negative:
    [Positive or negative?|Sentiment, positive or negative:|Positive or negative:]
""")
ASK_TOPIC = line_list(f"""
    [What is|Which is] the topic of {_TEXT}?
    @do [classify|find|name|tell me|pick|choose|give me|say] the topic of {_TEXT}
    Which topic [is this|fits this|fits best|is it|does it have]?
    [Topic|The topic|Pick one topic|Choose one topic][?|:|, please:]
""")
ASK_OPPOSITE = line_list("""
    [What is|What's|Which is|Do you know|And] the opposite of {x}?
    @do [give me|tell me|name|say|write|find] the opposite of {x}.
    Which word [means the opposite of|is the opposite of|is opposite to] {x}?
    [Opposite of|The opposite of] {x}[?|, please.]
""")
ASK_MEMBER = line_list("""
    Does {x} [belong to|count among|fit with|go with] [|the ]{c}?
    Is {x} [one of the|among the|in the group of|part of the] {c}?
    Are {c} the [right|proper|correct] [group|kind|category] for {x}?
    Would you [put|count|place|group] {x} [with|among] the {c}?
    @do [tell me|say|decide] [if|whether] {x} [belongs to|is one of] the {c}.
""")
WHY = line_list("""
    Why[?| is that?| is it so?| do you say that?]
    [Why|What makes you|How come you] [think|say] [so|that]?
    How [do|can|did] you [know|tell|see] [that|it]?
    @do explain [why|your answer|that].
    [And why|And why so|Can you explain|For what reason]?
""")


def _mood(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A request for the sentiment of a review, the label, and the reason."""
    label, words = rng.choice((("positive", GOOD), ("negative", BAD)))
    word = pick(rng, split, words)
    text = pick(rng, split, REVIEWS).format(
        word=word,
        a_word=article_for(word),
        thing=filler(rng, split, OBJECTS),
        name=person(rng, split)[0],
        place=filler(rng, split, PLACES),
    )
    return f"{wording(rng, split, ASK_MOOD)} {text}", label, f'The word "{word}" is {label}.'


def _topic(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A request for the topic of a sentence, the label, and the reason."""
    label = rng.choice(list(TOPICS))
    text = pick(rng, split, TOPICS[label]).format(
        k=rng.randint(2, 20), name=person(rng, split)[0], town=town(rng, split), day=rng.choice(WEEKDAYS)
    )
    ask = f"{wording(rng, split, ASK_TOPIC)} ({', '.join(TOPICS)})"
    return f"{ask} {text}", label, f"The sentence is about {label}."


def classify(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Sentiment or topic of a sentence, with a reason when asked."""
    request, label, reason = rng.choice((_mood, _topic))(rng, split)
    chat.ask(request, label, Check("exact", label))
    if rng.random() < 0.25:
        chat.ask(wording(rng, split, WHY), reason, Check("facts", [label]))


def _opposite(rng: random.Random, split: Split, chat: Conversation) -> None:
    left, right = rng.sample(rng.choice(OPPOSITES), 2)
    request = wording(rng, split, ASK_OPPOSITE).format(x=left)
    chat.ask(request, f"The opposite of {left} is {right}.", Check("facts", [right]))


def _member(rng: random.Random, split: Split, chat: Conversation) -> None:
    (mine, members), (other, _) = rng.sample(list(CATEGORIES.items()), 2)
    thing, told = rng.choice(members), rng.choice((mine, other))
    fits = thing in CATEGORIES[told]
    reply = f"Yes, {thing} belongs to {told}." if fits else f"No, {thing} belongs to {mine}."
    request = wording(rng, split, ASK_MEMBER).format(x=thing, c=told)
    chat.ask(request, reply, Check("facts", ["Yes" if fits else "No"]))


def know(rng: random.Random, split: Split, chat: Conversation) -> None:
    """Opposites, and whether something belongs to a category."""
    for _ in range(rng.choice((1, 2, 3))):
        rng.choice((_opposite, _member))(rng, split, chat)
