"""The catalogue of functions the model learns, read from ``functions.txt``: code, wordings and test calls.

A description may hold ``{k}`` or ``{m}``, numbers that each split draws from its own residues, so that
held-out items pair unseen wordings with unseen constants, a small number ``{s}``, or letters ``{c}`` and
``{e}``. Expected values come from running the reference code itself.
"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from .base import SPLITS, Choices, Split, expand

CONSTANTS: dict[Split, list[int]] = {
    split: [k for k in range(2, 100) if (k % 6 == 5) == (split == "heldout")] for split in SPLITS
}
# Wordings of the catalogue that mean the same; each is written out with all of its group.
SAME = [
    ("returns ", "gives "),
    ("computes ", "calculates ", "finds ", "works out ", "determines "),
    (
        "checks if ",
        "checks whether ",
        "tells whether ",
        "tells if ",
        "tests if ",
        "says if ",
        "returns True if ",
    ),
    ("keeps only ", "selects only ", "picks only ", "keeps "),
    ("counts ", "counts up "),
    ("adds up ", "sums up ", "totals "),
    ("removes ", "deletes ", "drops ", "takes out "),
    ("converts ", "turns ", "changes "),
]
OBJECTS = {
    "a list": "[a list|a given list|the given list|the list]",
    "a string": "[a string|a given string|a text]",
    "a number": "[a number|a given number|the number]",
    "two numbers": "[two numbers|two given numbers|the two numbers]",
    "a text": "[a text|a given text|a string]",
}


def filled(text: str, made: dict[str, str]) -> str:
    """The text with its constants in place; other braces, those of code, stay."""
    for name in ("k", "m", "s", "c", "e"):
        text = text.replace(f"{{{name}}}", made[name])
    return text


def paraphrases(wording: str) -> list[str]:
    """A wording of the catalogue with other verbs and other words for what it works on."""
    for group in SAME:
        lead = next((lead for lead in group if wording.startswith(lead)), None)
        if lead and not wording.endswith("or zero"):
            wording = f"[{'|'.join(group)}]{wording.removeprefix(lead)}"
            break
    for plain, several in OBJECTS.items():
        if re.search(rf"\b{plain}\b(?! of (lists|strings))", wording):
            return expand(re.sub(rf"\b{plain}\b", several, wording, count=1))
    return expand(wording)


@dataclass(frozen=True)
class Kind:
    """One function: its name, one-line body or lines, parameters, wordings and test arguments."""

    name: str
    params: str
    body: str
    wordings: tuple[str, ...]
    calls: tuple[str, ...]

    @cached_property
    def _wordings(self) -> Choices[str]:
        return Choices([self.wordings])

    def fill(self, rng: random.Random, split: Split) -> dict[str, str]:
        """Draw a wording and a constant."""
        numbers, (c, e) = CONSTANTS[split], rng.sample(string.ascii_lowercase, 2)
        k, m = (str(rng.choice(numbers[:8] if rng.random() < 0.5 else numbers)) for _ in range(2))
        made = {"k": k, "m": m, "s": str(rng.choice(numbers[:2])), "c": c, "e": e}
        return made | {"d": filled(self._wordings.draw(rng, split), made), "f": filled(self.name, made)}

    def code(self, made: dict[str, str]) -> str:
        """The reference code under the drawn name and constant."""
        lines = filled(self.body, made).split("\n")
        body = "\n".join(f"    {line}" for line in lines)
        return f"def {made['f']}({self.params}):\n{body}"

    def filled_tests(self, made: dict[str, str]) -> list[tuple[str, str]]:
        """(call, repr of its value) pairs."""
        source = self.code({**made, "f": "f"})
        return [(f"{made['f']}({args})", _value(source, args)) for args in self.calls]


@lru_cache(maxsize=100_000)
def _value(source: str, args: str) -> str:
    scope: dict[str, object] = {}
    exec(source, scope)  # our own catalogue, not outside text
    return repr(eval(f"f({args})", scope))


def parse(text: str) -> list[Kind]:
    """The kinds of a catalogue: head line, indented code, ``-`` wordings, ``>`` calls; a blank line."""
    kinds = []
    for block in text.strip().split("\n\n"):
        head, *lines = block.split("\n")
        name, params = head.rstrip(")").split("(")
        body = "\n".join(line[4:] for line in lines if line.startswith("    "))
        wordings = tuple(text for line in lines if line.startswith("- ") for text in paraphrases(line[2:]))
        calls = tuple(
            call.strip() for line in lines if line.startswith("> ") for call in line[2:].split(" | ")
        )
        kinds.append(Kind(name, params, body, wordings, calls))
    return kinds


KINDS: list[Kind] = parse((Path(__file__).parent / "functions.txt").read_text(encoding="utf-8"))
