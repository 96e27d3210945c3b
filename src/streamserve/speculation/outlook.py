"""What a speculation policy may know of a step: before anything is drafted, and once the trees are there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamserve.speculation.shapes import Seconds, Shape
from streamserve.speculation.slo import NO_NEED, Need
from streamserve.speculation.tree import TokenTree

SURE_LEVELS = 4
"""Guesses in a row that are counted on: as texts differ, a mean says too much of long chains."""


class Candidate(NamedTuple):
    """A decoding request that can be drafted for: how deep its tree may be, how many nodes there is room
    for, what its latency target asks, and its priority (lower is more urgent)."""

    depth: int
    nodes: int
    need: Need = NO_NEED
    priority: int = 0
    id: int = 0


@dataclass(frozen=True)
class Outlook:
    """A step before drafting.

    `others` rows of the step are not of `candidates`; `bystanders` are the needs of those among them that
    decode. `step(rows)` and `draft(shapes)` are seconds; `covers[w - 1][l]` is the chance at level l that the
    next token is among a node's best w guesses, given that all above it were right. `nodes` bounds each
    request's guesses. `load` is the share of the engine's places taken; `acceptance` the share of the last
    step's guesses that was accepted (None where there were none), `right` how many that were of those
    `tested`: what stands behind a wrong guess was not. `throughput` is tokens a second, lately.
    """

    candidates: Sequence[Candidate]
    others: int
    step: Seconds
    draft: Callable[[Sequence[Shape]], float]
    covers: Sequence[Sequence[float]]
    nodes: int
    bystanders: Sequence[Need] = ()
    load: float = 0.0
    acceptance: float | None = None
    right: int = 0
    tested: int = 0
    throughput: float = 0.0


@dataclass(frozen=True)
class Drafted:
    """A step once the trees are there. `needs[i]` is that of the request of `trees[i]`, `bystanders` are
    those of requests that decode without a tree. The step has `plain` rows without any guess, and may have
    `budget` guesses; `spent` seconds went into drafting."""

    trees: Sequence[TokenTree]
    needs: Sequence[Need]
    bystanders: Sequence[Need]
    plain: int
    spent: float
    step: Seconds
    budget: int

    @property
    def decoding(self) -> int:
        """Requests that decode, with a tree or without."""
        return len(self.trees) + len(self.bystanders)


@dataclass(frozen=True)
class Means:
    """What decoding takes and brings: `step(rows)` are the seconds of a step, `draft(requests)` those of one
    level of guesses for so many; a guess is right with probability `cover`, and up to `depth` are made in a
    row (0: nobody guesses). Beside what decodes a step has `others` rows of prompts, on average."""

    step: Callable[[int], float]
    draft: Callable[[int], float]
    cover: float
    depth: int
    others: int = 0
