"""The catalogue of functions the model learns, read from ``functions.txt``: code, wordings and test calls.

A description may hold ``{k}``, a number that each split draws from its own residues, so that held-out items
pair unseen wordings with unseen constants. Expected values come from running the reference code itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .base import Split, pick


@dataclass(frozen=True)
class Kind:
    """One function: its name, one-line body or lines, parameters, wordings and test arguments."""

    name: str
    params: str
    body: str
    wordings: tuple[str, ...]
    calls: tuple[str, ...]

    def fill(self, rng: random.Random, split: Split) -> dict[str, str]:
        """Draw a wording and a constant."""
        numbers = [k for k in range(2, 60) if (k % 6 == 5) == (split == "heldout")]
        k = str(rng.choice(numbers[:8] if rng.random() < 0.5 else numbers))
        text = pick(rng, split, self.wordings).replace("{k}", k)
        return {"d": text, "f": self.name.replace("{k}", k), "k": k}

    def code(self, made: dict[str, str]) -> str:
        """The reference code under the drawn name and constant."""
        lines = self.body.replace("{k}", made["k"]).split("\n")
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
        wordings = tuple(line[2:] for line in lines if line.startswith("- "))
        calls = tuple(
            call.strip() for line in lines if line.startswith("> ") for call in line[2:].split(" | ")
        )
        kinds.append(Kind(name, params, body, wordings, calls))
    return kinds


KINDS: list[Kind] = parse((Path(__file__).parent / "functions.txt").read_text(encoding="utf-8"))
