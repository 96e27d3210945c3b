"""Functions put together from a few building blocks: filters, changes and totals of lists, chains of steps.

Nearly every pair of blocks is one function; the pairs are split like any list, so that a held-out function
needs blocks that training has shown in other company. Alternatives in brackets are expanded into wordings.
"""

from __future__ import annotations

from itertools import permutations, product

from .base import expand
from .function_kinds import Kind

GET = "[returns|gives|computes|finds|calculates|gives back]"
IN = "[in|of|from] [a list|a list of numbers|a given list|the list]"
CHECK = "[checks if|checks whether|tells if|tells whether|tests if|says if|returns True if|decides whether]"
NUMBERS = ("[0, 1, 150, -4, 33, 72]", "[200, -7, 0, 1, 90, 15]", "[12, -1, 5, 0, 105]")
WORDS = (
    "['pear', 'fig', 'apple', 'tea']",
    "['sun', 'moon', 'grandmother', 'a']",
    "['Road', 'bus', 'letter']",
)
TEXTS = ("'hello world'", "'Banana bread'", "'a cat sat'")

# name, condition on x, noun phrase, predicate
FILTERS = [
    ("even", "x % 2 == 0", "the even numbers", "even"),
    ("odd", "x % 2 == 1", "the odd numbers", "odd"),
    ("positive", "x > 0", "the [positive numbers|numbers above zero]", "positive"),
    ("negative", "x < 0", "the [negative numbers|numbers below zero]", "negative"),
    (
        "above",
        "x > {k}",
        "the numbers [above|greater than|over|larger than] {k}",
        "[above|greater than|over] {k}",
    ),
    (
        "below",
        "x < {k}",
        "the numbers [below|less than|under|smaller than] {k}",
        "[below|less than|under] {k}",
    ),
    (
        "multiple",
        "x % {k} == 0",
        "the [multiples of|numbers divisible by] {k}",
        "[divisible by|a multiple of] {k}",
    ),
    (
        "other",
        "x != {k}",
        "the numbers [that are not|other than|different from] {k}",
        "[not|different from] {k}",
    ),
]
# name, changed x, words before and after the noun phrase
CHANGES = [
    ("squares", "x * x", "the squares of ", ""),
    ("cubes", "x ** 3", "the cubes of ", ""),
    ("doubles", "x * 2", "the doubles of ", ""),
    ("halves", "x / 2", "the halves of ", ""),
    ("sizes", "abs(x)", "the absolute values of ", ""),
    ("opposites", "-x", "the negatives of ", ""),
    ("plus", "x + {m}", "", " [plus|with {m} added to each, that is plus|each increased by|each plus] {m}"),
    ("minus", "x - {m}", "", " [minus|each minus|each decreased by|each reduced by] {m}"),
    ("times", "x * {m}", "", " [times|each times|each multiplied by|multiplied by] {m}"),
]
# name, code around the values, wordings around the noun phrase
TOTALS = [
    ("sum", "sum({})", (f"{GET} the [sum|total] of @", "[adds up|sums|sums up|totals] @")),
    ("count", "len([{}])", ("[counts|counts all of] @", f"{GET} how many there are of @")),
    ("largest", "max({})", (f"{GET} the [largest|biggest|greatest|maximum] of @",)),
    ("smallest", "min({})", (f"{GET} the [smallest|lowest|least|minimum] of @",)),
    ("list", "[{}]", ("[returns|gives|lists|collects|makes a list of] [only |all |]@",)),
    (
        "sorted",
        "sorted({})",
        ("[returns|gives|lists] @ in [ascending|sorted] order", "[sorts|puts in order] @"),
    ),
]
WORD_FILTERS = [
    (
        "long",
        "len(word) > {s}",
        "[longer than {s} letters|with more than {s} letters|of more than {s} letters]",
    ),
    (
        "short",
        "len(word) < {s}",
        "[shorter than {s} letters|with fewer than {s} letters|of less than {s} letters]",
    ),
    ("start", "word.startswith('{c}')", "that [start|begin] with '{c}'"),
    ("end", "word.endswith('{c}')", "that end [with|in] '{c}'"),
    ("with", "'{c}' in word", "[that contain|containing|that have] '{c}'"),
    ("without", "'{c}' not in word", "[without|that do not contain|that have no] '{c}'"),
]
WORD_CHANGES = [
    ("words", "[{}]", "word", "[returns|keeps|selects|finds|lists] [only |all |]the words @"),
    ("count", "len([{}])", "word", "[counts|returns how many there are of|gives the number of] the words @"),
    ("shout", "[{}]", "word.upper()", "[returns|gives|lists] in upper case the words @"),
    ("lengths", "[{}]", "len(word)", "[returns|gives|lists] the lengths of the words @"),
    ("joined", "' '.join({})", "word", "[joins with spaces|joins into one text] the words @"),
    ("backwards", "[{}]", "word[::-1]", "[reverses|returns backwards|turns around] the words @"),
    ("first", "[{}]", "word[0]", "[returns|gives|lists] the first letters of the words @"),
    ("total", "sum({})", "len(word)", "[adds up|sums|totals] the lengths of the words @"),
]
# name, code around the text, wording about an object
STEPS = [
    ("reverse", "{}[::-1]", "[reverses|turns around|flips] @"),
    ("upper", "{}.upper()", "[uppercases|puts into capitals|converts to upper case] @"),
    ("lower", "{}.lower()", "[lowercases|puts into small letters|converts to lower case] @"),
    ("strip", "{}.strip()", "[strips|trims] @"),
    ("first", "{}[:{s}]", "[takes|keeps] the first {s} [letters|characters] of @"),
    ("last", "{}[-{s}:]", "[takes|keeps] the last {s} [letters|characters] of @"),
    ("swap", "{}.replace('{c}', '{e}')", "[replaces|changes] '{c}' [by|with] '{e}' in @"),
    ("drop", "{}.replace('{c}', '')", "[removes|deletes|drops] [every|each] '{c}' [from|in] @"),
]
SUMS = [
    ("add", "x + {k}", "adds {k} to @"),
    ("increase", "x + {m}", "[increases|raises] @ by {m}"),
    ("take", "x - {k}", "[subtracts|takes] {k} from @"),
    ("times", "x * {m}", "[multiplies] @ [by|with] {m}"),
    ("scale", "x * {k}", "[multiplies|scales] @ by {k}"),
    ("divide", "x / {m}", "divides @ by {m}"),
    ("square", "x * x", "squares @"),
    ("negate", "-x", "[negates|changes the sign of] @"),
    ("rest", "x % {m}", "takes the remainder of @ [divided|after division] by {m}"),
    ("size", "abs(x)", "takes the absolute value of @"),
]


def _kind(name: str, params: str, body: str, wordings: tuple[str, ...], calls: tuple[str, ...]) -> Kind:
    return Kind(name, params, body, tuple(text for line in wordings for text in expand(line)), calls)


def _numbers() -> list[Kind]:
    """A total of filtered, changed, or filtered and changed numbers."""
    kinds = []
    plain = [("", "", "[the|all] numbers", "")], [("", "x", "", "")]
    for total, sieve, change in product(TOTALS, FILTERS + plain[0], CHANGES + plain[1]):
        if (not sieve[0] and not change[0]) or (sieve[0] and change[0] and total[0] not in ("sum", "list")):
            continue
        if total[0] == "count" and change[0]:
            continue
        values = f"{change[1]} for x in numbers" + (f" if {sieve[1]}" if sieve[0] else "")
        shown = f"{change[2]}{sieve[2]} {IN}{change[3]}"
        name = "_".join(filter(None, (total[0], sieve[0], change[0])))
        body = f"return {total[1].format(values)}"
        kinds.append(_kind(name, "numbers", body, tuple(w.replace("@", shown) for w in total[2]), NUMBERS))
    return kinds


def _checks() -> list[Kind]:
    """Whether any or all numbers of a list, or one number, are of a kind."""
    kinds = []
    for name, test, _, told in FILTERS:
        some = f"{CHECK} [any|some|at least one] number {IN} is {told}"
        every = f"{CHECK} [every|each] number {IN} is {told}"
        one = f"{CHECK} [a number|x|its argument|a given number] is {told}"
        kinds.append(
            _kind(f"any_{name}", "numbers", f"return any({test} for x in numbers)", (some,), NUMBERS)
        )
        kinds.append(
            _kind(f"all_{name}", "numbers", f"return all({test} for x in numbers)", (every,), NUMBERS)
        )
        kinds.append(_kind(f"is_{name}", "x", f"return {test}", (one,), ("0", "7", "-60", "45")))
    return kinds


def _words() -> list[Kind]:
    """Filtered words of a list, changed or counted."""
    kinds = []
    for (out, around, value, text), (name, test, told) in product(WORD_CHANGES, WORD_FILTERS):
        body = f"return {around.format(f'{value} for word in words if {test}')}"
        wording = text.replace("@", f"[in|of] [a list|a list of words|a given list|the list] {told}")
        kinds.append(_kind(f"{out}_{name}", "words", body, (wording,), WORDS))
    return kinds


def _chained(first: str, second: str, one: str) -> str:
    then = second.replace("@", "[the result|it]")
    return f"{first.replace('@', one)} [and then|and|, then] {then}"


def _texts() -> list[Kind]:
    """One or two steps on a text."""
    one = "[a text|a string|a given text|its argument]"
    kinds = [
        _kind(
            f"{name}_text", "text", f"return {code.replace('{}', 'text')}", (told.replace("@", one),), TEXTS
        )
        for name, code, told in STEPS
    ]
    for (a, code, told), (b, code2, told2) in permutations(STEPS, 2):
        body = f"text = {code.replace('{}', 'text')}\nreturn {code2.replace('{}', 'text')}"
        kinds.append(_kind(f"{a}_then_{b}", "text", body, (_chained(told, told2, one),), TEXTS))
    return kinds


def _steps() -> list[Kind]:
    """Two sums on a number, one after the other."""
    kinds = []
    for (a, code, told), (b, code2, told2) in permutations(SUMS, 2):
        wording = _chained(told, told2, "[a number|x|its argument|a given number]")
        kinds.append(
            _kind(f"{a}_then_{b}", "x", f"x = {code}\nreturn {code2}", (wording,), ("1", "10", "-3"))
        )
    return kinds


COMPOSED: list[Kind] = [*_numbers(), *_checks(), *_words(), *_texts(), *_steps()]
