"""How much is guessed: the policies by name."""

from dataclasses import dataclass

from streamserve.policy.goodput import PLAIN, Shape

MOST_DEPTH = 16
"""The deepest tree anybody asks for, and the widest."""


@dataclass(frozen=True)
class SpeculationPolicy:
    """`goodput` chooses by itself; `fixed` always asks for `shape`; `off` never drafts."""

    kind: str
    shape: Shape = PLAIN


def parse_policy(text: str) -> SpeculationPolicy:
    """`goodput`, `off`, `fixed:DEPTH` or `fixed-tree:WIDTHxDEPTH`. Raises ValueError for anything else."""
    kind, _, rest = text.partition(":")
    if text in ("goodput", "off"):
        return SpeculationPolicy(text)
    width, _, depth = rest.rpartition("x")
    if (kind == "fixed" and not width) or (kind == "fixed-tree" and width):
        numbers = [part for part in (width, depth) if part]
        if all(part.isascii() and part.isdigit() and 1 <= int(part) <= MOST_DEPTH for part in numbers):
            return SpeculationPolicy("fixed", Shape(int(depth), int(width or 1)))
    raise ValueError(
        f"the speculation policy {text!r} is none of goodput, off, fixed:DEPTH, fixed-tree:WIDTHxDEPTH "
        f"(each at most {MOST_DEPTH})"
    )
