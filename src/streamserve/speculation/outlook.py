"""Inputs of a speculation policy: a step before drafting, and once the trees have arrived."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamserve.contracts.tree import TokenTree
from streamserve.speculation.shapes import Seconds, Shape
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

Selection = list[list[int]]
"""For each tree the nodes to verify, ascending, with the root."""

RELIABLE_LEVELS = 4
"""Consecutive draft tokens whose mean acceptance is relied on: texts differ, so a mean overestimates long
chains."""


class Candidate(NamedTuple):
    """A decoding request that may have draft tokens: the maximum depth of its tree, the maximum number of
    nodes, its latency requirement, its priority (lower is more urgent), and whether it is sampled."""

    depth: int
    nodes: int
    requirement: LatencyRequirement = NO_REQUIREMENT
    priority: int = 0
    id: int = 0
    sampled: bool = False


@dataclass(frozen=True)
class Outlook:
    """A step before drafting.

    * `others`: query tokens of the step that are not of `candidates`; `undrafted` are the requirements of the
      decoding requests among them.
    * `step(query_tokens)` and `draft(shapes)`: seconds.
    * `level_acceptance[w - 1][l]`: the probability at level l that the next token is among a node's best w
      candidates, given that all above it were accepted.
    * `nodes`: the most draft tokens of each request.
    * `load`: the share of the engine's sequence slots taken.
    * `acceptance`: the share of the last step's draft tokens that was accepted (None if there were none).
    * `accepted`: how many were accepted of those `tested`: draft tokens after a rejected one were not tested.
    * `throughput`: recent tokens a second.
    """

    candidates: Sequence[Candidate]
    others: int
    step: Seconds
    draft: Callable[[Sequence[Shape]], float]
    level_acceptance: Sequence[Sequence[float]]
    nodes: int
    undrafted: Sequence[LatencyRequirement] = ()
    load: float = 0.0
    acceptance: float | None = None
    accepted: int = 0
    tested: int = 0
    throughput: float = 0.0


@dataclass(frozen=True)
class DraftedStep:
    """A step once the trees have arrived. `requirements[i]` is that of the request of `trees[i]`, `undrafted`
    are those of decoding requests without a tree. The step has `plain` query tokens without draft tokens, and
    may have `budget` draft tokens; drafting took `spent` seconds."""

    trees: Sequence[TokenTree]
    requirements: Sequence[LatencyRequirement]
    undrafted: Sequence[LatencyRequirement]
    plain: int
    spent: float
    step: Seconds
    budget: int

    @property
    def decoding(self) -> int:
        """Number of decoding requests, with a tree or without."""
        return len(self.trees) + len(self.undrafted)


@dataclass(frozen=True)
class Means:
    """Averages of decoding: `step(query_tokens)` is the seconds of a step, `draft(requests)` those of one
    level of draft tokens for so many requests. A draft token is accepted with probability `acceptance`, and
    chains have up to `depth` (0: no speculation)."""

    step: Callable[[int], float]
    draft: Callable[[int], float]
    acceptance: float
    depth: int
