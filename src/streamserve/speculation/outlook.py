"""Inputs of a speculation policy: a step before drafting, and the step with its drafted trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamserve.contracts.tree import TokenTree
from streamserve.speculation.shapes import Seconds, TreeShape
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

Selection = list[list[int]]
"""The nodes to verify of each tree, ascending, with the root."""

RELIABLE_LEVELS = 4
"""Maximum length of draft chains that are predicted by mean acceptance: texts differ, so the mean
overestimates longer chains."""


class Candidate(NamedTuple):
    """A decoding request that may have draft tokens: the maximum `depth` of its tree and number of `nodes`,
    its latency requirement, its priority (lower is more urgent), and whether it is sampled or greedy."""

    depth: int
    nodes: int
    requirement: LatencyRequirement = NO_REQUIREMENT
    priority: int = 0
    id: int = 0
    sampled: bool = False


@dataclass(frozen=True)
class Outlook:
    """A step before drafting.

    * `candidates`: the decoding requests that may have draft tokens.
    * `others`: query tokens of other requests in the step. `undrafted`: the requirements of the decoding
      requests among these.
    * `step(query_tokens)` and `draft(shapes)`: seconds of a step, and of drafting.
    * `level_acceptance[w - 1][l]`: the probability at level l that the next token is among a node's best w
      candidates, given that all tokens above it were accepted.
    * `nodes`: maximum draft tokens of each request.
    * `load`: the share of the engine's sequence slots that are taken.
    * `acceptance`: the share of the last step's draft tokens that was accepted (None if it had none).
    * `accepted`: accepted draft tokens of the last step. `tested`: its draft tokens up to the first rejected
      token of each request; the target does not judge later tokens.
    * `throughput`: recent tokens a second.
    """

    candidates: Sequence[Candidate]
    others: int
    step: Seconds
    draft: Callable[[Sequence[TreeShape]], float]
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
    """A step with its drafted trees, before the nodes to verify are selected.

    * `requirements[i]`: the latency requirement of the request of `trees[i]`.
    * `undrafted`: the requirements of the decoding requests without a tree.
    * `plain`: query tokens of the step without draft tokens.
    * `spent`: seconds that drafting took.
    * `step(query_tokens)`: seconds of a step.
    * `budget`: maximum draft tokens of all requests together.
    """

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
    """Averages of decoding. `step(query_tokens)` returns the seconds of a step, `draft(requests)` the seconds
    of drafting one token for each of `requests` requests. A draft token is accepted with probability
    `acceptance`. Draft chains have up to `depth` tokens (0: no speculation)."""

    step: Callable[[int], float]
    draft: Callable[[int], float]
    acceptance: float
    depth: int
