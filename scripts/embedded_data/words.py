"""Slot fillers: the names, nouns, verbs and small facts that templates are filled with.

Proper names are mostly built from syllables, so that a model must learn to copy a name from its context and
cannot remember a short list. The syllables themselves are split: no held-out name occurs in training.
"""

from __future__ import annotations

import random

from .base import Split, part, pick, word_list

GIRLS = word_list("""
    Anna Maria Lucy Mia Emma Zoe Nina Clara Ruth Ella Lily Grace Sofia Ines Olga Petra Rosa Tara Vera Wanda
    Alice Amina Bella Carmen Daisy Diana Elena Fatima Freya Gina Hana Helen Iris Ivy Jane Julia Kate Kira
    Laura Leila Linda Maya Mona Nadia Nora Olivia Pia Priya Rita Sara Selma Tina Uma Yara Yuki Zara Ada Bea
    Cleo Edith
""")
BOYS = word_list("""
    Adam Ben Carl David Erik Felix George Henry Ivan Jack Karl Leo Mark Noah Oscar Paul Ralf Sam Tom Victor
    Ahmed Alan Amir Bruno Chris Dan Diego Elias Emil Finn Frank Hugo Igor Jan Jonas Juan Kai Ken Liam Luca
    Luis Max Milo Nick Omar Otto Pedro Peter Ravi Robin Sven Theo Tim Umar Walter Will Yusuf Zack Abel Cole
""")
ONSETS = word_list("""
    B Br C Cal D Dor F Fal G Gar H Har J Jor K Kel L Lar M Mar N Nor P Pel R Ren S Sel T Tor V Vel W Win Z
""")
MIDDLES = word_list("a ado al an ar e el en er i il in ir o ol on or u un ur ay ea")
ENDINGS = word_list("""
    bell dale dan der ford gan ham ley lin man mer mond more nell ner rick rin ro sen ser shaw son ston ta
    ton vale van wick win wood zel
""")
PLACE_ENDINGS = word_list("""
    ford ham ton ville berg field bridge port haven mouth stead wick burg dale brook hill holm worth gate
    minster cliff crest
""")
OBJECTS = word_list("""
    apple book pencil marble coin stamp shell card button flower cookie candle sticker ball egg orange stone
    key ticket bottle brick cup hat lamp leaf letter map nail pear plate ribbon ring rope seed shoe spoon
    toy tile lemon muffin mango peach plum carrot potato tomato onion balloon crayon bead feather photo
    postcard puzzle sock towel basket bagel cupcake sandwich magnet kite doll robot badge notebook eraser
    ruler peg jar bell acorn olive
""")
CONTAINERS = word_list("box bag basket crate shelf jar tray case drawer packet bucket bin carton sack")
ANIMALS = word_list("""
    cat dog horse cow sheep goat rabbit mouse fox wolf bear lion tiger monkey elephant giraffe zebra camel
    frog snake turtle duck goose eagle owl parrot penguin whale dolphin shark salmon bee ant spider beetle
    deer
""")
FRUITS = word_list("""
    apple pear plum banana grape mango orange lemon cherry peach melon kiwi fig lime papaya apricot
""")
COLORS = word_list("red blue green yellow purple orange pink brown black white grey gold silver violet")
VEGETABLES = word_list("""
    carrot potato onion cabbage spinach pea bean leek turnip beet broccoli celery radish pumpkin
""")
JOBS = word_list("""
    teacher doctor baker farmer nurse pilot painter writer singer cook driver builder lawyer judge tailor
    gardener mechanic engineer librarian dentist plumber sailor carpenter photographer reporter scientist
""")
TOOLS = word_list("""
    hammer saw drill wrench pliers chisel file axe shovel rake screwdriver ladder clamp level
""")
INSTRUMENTS = word_list("piano guitar violin flute drum trumpet cello harp clarinet oboe banjo organ tuba")
SPORTS = word_list("""
    football tennis hockey chess rugby golf swimming boxing rowing cycling judo skiing archery cricket
""")
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
ADJECTIVES = word_list("""
    small big old new red blue green quiet loud bright dark warm cold soft heavy light clean dusty round
    wooden shiny broken pretty plain narrow wide tall short sweet sour fresh strange gentle brave clever
    lazy busy happy sad proud shy calm curious friendly careful
""")
# (base form, past, past participle): verbs that take any of the objects.
VERBS = [
    ("find", "found", "found"),
    ("buy", "bought", "bought"),
    ("paint", "painted", "painted"),
    ("carry", "carried", "carried"),
    ("clean", "cleaned", "cleaned"),
    ("drop", "dropped", "dropped"),
    ("hide", "hid", "hidden"),
    ("lose", "lost", "lost"),
    ("move", "moved", "moved"),
    ("open", "opened", "opened"),
    ("push", "pushed", "pushed"),
    ("repair", "repaired", "repaired"),
    ("sell", "sold", "sold"),
    ("steal", "stole", "stolen"),
    ("take", "took", "taken"),
    ("throw", "threw", "thrown"),
    ("wash", "washed", "washed"),
    ("watch", "watched", "watched"),
    ("wrap", "wrapped", "wrapped"),
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
SYNONYMS = [
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
]
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
PLACES = word_list("""
    garden kitchen park school library market station harbor museum office shop farm forest beach hall
    bakery cellar attic workshop classroom theater stadium clinic barn
""")


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
    }
    if noun in irregular:
        return irregular[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun in ("potato", "tomato", "mango") or noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun + "s"


def count_of(number: int, noun: str) -> str:
    """``1 apple`` or ``3 apples``."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def made_up(rng: random.Random, split: Split, endings: list[str]) -> str:
    """A word built from split syllables, such as ``Calenford``."""
    return pick(rng, split, ONSETS) + pick(rng, split, MIDDLES) + pick(rng, split, endings)


def surname(rng: random.Random, split: Split) -> str:
    """A made-up family name."""
    return made_up(rng, split, ENDINGS)


def town(rng: random.Random, split: Split) -> str:
    """A made-up town name."""
    return made_up(rng, split, PLACE_ENDINGS)


def person(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A first name with its subject and possessive pronouns."""
    girl = rng.random() < 0.5
    if rng.random() < 0.2:
        return (surname(rng, split), "she", "her") if girl else (surname(rng, split), "he", "his")
    return (pick(rng, split, GIRLS), "she", "her") if girl else (pick(rng, split, BOYS), "he", "his")


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
    """``count`` different nouns, from one category or from all objects."""
    pool = part(OBJECTS, split)
    if rng.random() < 0.5:
        narrow = part(rng.choice(list(CATEGORIES.values())), split)
        pool = narrow if len(narrow) >= count else pool
    return rng.sample(pool, count)
