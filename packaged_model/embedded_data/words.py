"""Slot fillers: the names, nouns, verbs and small facts that templates are filled with.

The long lists are in ``fillers.txt``. Part of the fillers is invented from syllables, so that a model must
learn to copy a word from its context and cannot remember a list; every piece of a held-out word is met in
training words.
"""

from __future__ import annotations

import random
from pathlib import Path

from .base import Choices, Split, held_out, word_list

INVENTED = 0.15


def _sections(text: str) -> dict[str, Choices[str]]:
    """The word lists of a file by the heading above each."""
    blocks = [block.partition("\n") for block in text.strip().split("# ")[1:]]
    return {name.strip(): word_list(words) for name, _, words in blocks}


_LISTS = _sections((Path(__file__).parent / "fillers.txt").read_text(encoding="utf-8"))
GIRLS, BOYS = _LISTS["girls"], _LISTS["boys"]
OBJECTS, CONTAINERS, ANIMALS = _LISTS["objects"], _LISTS["containers"], _LISTS["animals"]
JOBS, SPORTS, PLACES = _LISTS["jobs"], _LISTS["sports"], _LISTS["places"]
ADJECTIVES, NOUNS, REGULAR_VERBS = _LISTS["adjectives"], _LISTS["nouns"], _LISTS["verbs"]
ONSETS = word_list("""
    b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p ph pl pr qu r s sc sh sk sl sm sn sp st
    str t th
    tr tw v w wh y z
""")
NUCLEI = word_list("a e i o u ai au ea ee ei ia ie oa oo ou ui y")
CODAS = word_list("""
    b ck ct d ft g k l ld lk ll lm lt m mp n nd ng nk nt p r rd rk rm rn rt s sh sk ss st t th x z
""")
ENDINGS = word_list("""
    bell dale dan der ford gan ham ley lin man mer mond more nell ner rick rin ro sen ser shaw son ston
    ta ton vale
    van wick win wood zel berg ski ova ez ini ard ett ow by worth
""")
PLACE_ENDINGS = word_list("""
    ford ham ton ville berg field bridge port haven mouth stead wick burg dale brook hill holm worth
    gate minster cliff crest ley land shire grad polis view chester bury by
""")
FRUITS = word_list("""
    apple pear plum banana grape mango orange lemon cherry peach melon kiwi fig lime papaya apricot
""")
COLORS = word_list("red blue green yellow purple orange pink brown black white grey gold silver violet")
VEGETABLES = word_list("""
    carrot potato onion cabbage spinach pea bean leek turnip beet broccoli celery radish pumpkin
""")
TOOLS = word_list("""
    hammer saw drill wrench pliers chisel file axe shovel rake screwdriver ladder clamp level
""")
INSTRUMENTS = word_list("piano guitar violin flute drum trumpet cello harp clarinet oboe banjo organ tuba")
COUNTRIES = word_list("""
    France Spain Italy Japan Brazil Canada Egypt India Kenya Norway Peru Poland Greece Cuba Chile Sweden
""")
DRINKS = word_list("water tea coffee milk juice lemonade cocoa soda cider broth")
CLOTHES = word_list("shirt coat hat scarf glove sock shoe jacket skirt belt sweater boot dress cap")
FURNITURE = word_list("table chair bed sofa desk shelf lamp stool bench wardrobe cabinet mirror")
CATEGORIES: dict[str, list[str]] = {
    "animals": ANIMALS,
    "fruits": FRUITS,
    "colors": COLORS,
    "jobs": JOBS,
    "tools": TOOLS,
    "sports": SPORTS,
    "musical instruments": INSTRUMENTS,
    "vegetables": VEGETABLES,
    "countries": COUNTRIES,
    "drinks": DRINKS,
    "clothes": CLOTHES,
    "pieces of furniture": FURNITURE,
}
MONTHS = word_list("January February March April May June July August September October November December")
WEEKDAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def _past(verb: str) -> str:
    """The past of a regular verb."""
    if verb[-1] == "y" and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    if verb in (
        "drop",
        "wrap",
        "trim",
        "snatch",
        "dig",
        "hug",
        "grab",
        "drag",
        "ship",
        "spot",
        "strap",
        "swap",
    ):
        return verb + ("ed" if verb == "snatch" else verb[-1] + "ed")
    return verb + ("d" if verb.endswith("e") else "ed")


IRREGULAR_VERBS = [
    ("find", "found", "found"),
    ("buy", "bought", "bought"),
    ("hide", "hid", "hidden"),
    ("lose", "lost", "lost"),
    ("sell", "sold", "sold"),
    ("steal", "stole", "stolen"),
    ("take", "took", "taken"),
    ("throw", "threw", "thrown"),
    ("break", "broke", "broken"),
    ("bring", "brought", "brought"),
    ("build", "built", "built"),
    ("catch", "caught", "caught"),
    ("choose", "chose", "chosen"),
    ("draw", "drew", "drawn"),
    ("keep", "kept", "kept"),
    ("make", "made", "made"),
    ("show", "showed", "shown"),
]
# (base form, past, past participle): verbs that take any of the objects.
VERBS = Choices([IRREGULAR_VERBS, [(verb, _past(verb), _past(verb)) for verb in REGULAR_VERBS]])
SYNONYMS = Choices(
    [
        [
            ("purchase", "buy"),
            ("commence", "begin"),
            ("terminate", "end"),
            ("assist", "help"),
            ("utilize", "use"),
            ("demonstrate", "show"),
            ("require", "need"),
            ("obtain", "get"),
            ("inquire about", "ask about"),
            ("construct", "build"),
            ("observe", "see"),
            ("conceal", "hide"),
            ("repair", "fix"),
            ("select", "pick"),
            ("discard", "throw away"),
            ("retain", "keep"),
            ("attempt", "try"),
            ("finalize", "finish"),
            ("acquire", "get"),
            ("possess", "own"),
            ("inspect", "look at"),
            ("transport", "carry"),
            ("request", "ask for"),
            ("reside near", "live near"),
            ("fabricate", "make"),
            ("restore", "mend"),
            ("alter", "change"),
            ("contemplate", "think about"),
            ("locate", "find"),
            ("elevate", "lift"),
            ("seize", "grab"),
            ("transmit", "send"),
            ("consume", "use up"),
            ("examine", "check"),
        ]
    ]
)
OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("up", "down"),
    ("happy", "sad"),
    ("light", "dark"),
    ("old", "young"),
    ("full", "empty"),
    ("open", "closed"),
    ("early", "late"),
    ("near", "far"),
    ("hard", "soft"),
    ("wet", "dry"),
    ("long", "short"),
    ("loud", "quiet"),
    ("clean", "dirty"),
    ("rich", "poor"),
    ("thick", "thin"),
    ("strong", "weak"),
    ("left", "right"),
    ("high", "low"),
    ("first", "last"),
    ("day", "night"),
    ("true", "false"),
]


def plural(noun: str) -> str:
    """The plural of a regular noun (the lists above hold a few irregular ones)."""
    irregular = {
        "mouse": "mice",
        "goose": "geese",
        "sheep": "sheep",
        "deer": "deer",
        "wolf": "wolves",
        "shelf": "shelves",
        "leaf": "leaves",
        "salmon": "salmon",
        "person": "people",
        "ox": "oxen",
        "moose": "moose",
        "reindeer": "reindeer",
        "policeman": "policemen",
        "loaf": "loaves",
        "scarf": "scarves",
        "dice": "dice",
    }
    if noun in irregular:
        return irregular[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun in ("potato", "tomato", "mango", "domino", "buffalo") or noun.endswith(
        ("s", "x", "z", "ch", "sh")
    ):
        return noun + "es"
    return noun + "s"


def count_of(number: int, noun: str) -> str:
    """``1 apple`` or ``3 apples``."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def invent(rng: random.Random, split: Split, endings: list[str] | None = None) -> str:
    """A pronounceable word in lower case whose hash belongs to the split, such as ``trenoal``."""
    choice, wanted = rng.choice, split == "heldout"
    while True:
        word = ""
        for _ in range(choice((1, 1, 2) if endings else (1, 2, 2, 3))):
            nucleus = choice("aeiou") if rng.random() < 0.6 else choice(NUCLEI)
            word += choice(ONSETS) + nucleus + (choice(CODAS) if rng.random() < 0.45 else "")
        word += choice(endings) if endings else ""
        if 3 < len(word) < 13 and held_out(word) == wanted:
            return word


def made_up(rng: random.Random, split: Split, endings: list[str]) -> str:
    """An invented proper name, mostly with a familiar ending, such as ``Calenford``."""
    return invent(rng, split, endings if rng.random() < 0.7 else None).capitalize()


def filler(rng: random.Random, split: Split, items: Choices[str]) -> str:
    """A word of the list, or now and then an invented one."""
    return invent(rng, split) if rng.random() < INVENTED else items.draw(rng, split)


def surname(rng: random.Random, split: Split) -> str:
    """A made-up family name."""
    return made_up(rng, split, ENDINGS)


def town(rng: random.Random, split: Split) -> str:
    """A made-up town name of one word or two."""
    name = made_up(rng, split, PLACE_ENDINGS)
    if rng.random() < 0.15:
        return f"{rng.choice(('Port', 'New', 'East', 'West', 'Lake', 'Fort', 'Upper', 'Saint'))} {name}"
    return name


def person(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A first name with its subject and possessive pronouns."""
    girl = rng.random() < 0.5
    if rng.random() < 0.2:
        return (surname(rng, split), "she", "her") if girl else (surname(rng, split), "he", "his")
    return (GIRLS.draw(rng, split), "she", "her") if girl else (BOYS.draw(rng, split), "he", "his")


def full_name(rng: random.Random, split: Split) -> str:
    """A first and a family name."""
    return f"{person(rng, split)[0]} {surname(rng, split)}"


def date(rng: random.Random) -> str:
    """A day and a month, sometimes with a year; only the day numbers 1 to 28 occur."""
    day, month = rng.randint(1, 28), rng.choice(MONTHS)
    if rng.random() < 0.5:
        return f"{month} {day}"
    return f"{day} {month} {rng.randint(1950, 2049)}" if rng.random() < 0.5 else f"{day} {month}"


def things(rng: random.Random, split: Split, count: int) -> list[str]:
    """``count`` different nouns, of one kind or of all, some of them invented."""
    lists = (OBJECTS, OBJECTS, OBJECTS, ANIMALS, NOUNS, JOBS, PLACES, ADJECTIVES, GIRLS, BOYS, SPORTS)
    narrow, found = rng.choice(lists), dict[str, None]()
    wide = rng.random() < 0.3
    while len(found) < count:
        found[filler(rng, split, rng.choice(lists) if wide else narrow)] = None
    return list(found)
