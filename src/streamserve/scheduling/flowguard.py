"""FlowGuard: routing by a weighted sum of cached prefix, memory, queue and load (StreamServe)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from streamserve.scheduling.routing import (
    STEP_TOKENS,
    Arrival,
    Decision,
    RouteCandidate,
    best,
    cached_share,
    delay,
)

Weights = tuple[float, float, float, float]
"""The weights a1 to a4 of FlowGuard's C, M, Q and L."""


@dataclass(frozen=True)
class FlowGuard:
    """StreamServe's router: the candidate with the highest S = a1·C + a2·(1−M) + a3·(1−Q) + a4·(1−L).

    * C: the share of *this* prompt that is cached.
    * M: the share of KV blocks in use. L: the share of sequence slots that decode.
    * Q: the `delay` of first tokens, divided by STEP_TOKENS times the sequence slots. The paper counts queued
      prompts instead: then a prompt of 3000 tokens counts like a prompt of 30. The default weights give Q the
      most weight.

    Candidates are skipped if they are overloaded (M + 2 · queue depth > `overload`) or have been silent for
    more than `stale` seconds. If all are skipped, the request goes to the candidate with the shortest delay,
    if possible to one that is not silent. Equal scores go to the shortest queue, then in turn.
    baselines/routers.py has the router as published.

    Raises ValueError unless the weights are not negative and sum to 1.
    """

    weights: Weights = (0.02, 0.02, 0.94, 0.02)
    overload: float = 0.85
    stale: float = 1.5

    def __post_init__(self) -> None:
        check_weights(self.weights, self.overload, self.stale)

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        # Runs for every candidate of every request, so `score` is written out inline for speed.
        a1, a2, a3, a4 = self.weights
        overload, stale, prompt = self.overload, self.stale, max(arrival.prompt_tokens, 1)
        scores: list[float | None] = []
        highest, chosen, equal = -inf, 0, 0
        for candidate in candidates:
            prefill, decode = candidate.prefill, candidate.decode
            memory = prefill.blocks_live / prefill.blocks_total
            decode_memory = decode.blocks_live / decode.blocks_total
            memory = decode_memory if decode_memory > memory else memory
            slots = prefill.max_num_seqs
            if memory + 2 * prefill.queued / slots > overload or (
                prefill.silence > stale or decode.silence > stale
            ):
                scores.append(None)
                continue
            queue = delay(arrival, candidate) / (STEP_TOKENS * slots)
            load = decode.decoding / decode.max_num_seqs
            score = a1 * candidate.cached / prompt + a2 * (1 - memory) + a3 * (1 - queue) + a4 * (1 - load)
            if score > highest:
                highest, chosen, equal = score, len(scores), 1
            elif score == highest:
                equal += 1
            scores.append(score)
        if equal == 1:
            return Decision(chosen, tuple(scores), "highest score")
        if equal:
            return highest_score(candidates, scores, turn)
        keys = [(one.silence <= self.stale, -delay(arrival, one)) for one in candidates]
        return Decision(best(keys, turn), tuple(scores), "all overloaded or stale: shortest delay")

    def score(self, arrival: Arrival, candidate: RouteCandidate) -> float:
        """Return S of one candidate."""
        queue = delay(arrival, candidate) / (STEP_TOKENS * candidate.prefill.max_num_seqs)
        return weighted_score(self.weights, cached_share(arrival, candidate), queue, candidate)


def check_weights(weights: Weights, overload: float, stale: float) -> None:
    """Raise ValueError unless FlowGuard's weights are not negative and sum to 1, and its thresholds are
    positive."""
    if not (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-6):  # NaN fails every comparison
        raise ValueError(f"FlowGuard's weights {weights} must not be negative and sum to 1")
    if not overload > 0 or not stale > 0:
        raise ValueError("FlowGuard's overload threshold and stale time must be positive")


def weighted_score(weights: Weights, cached: float, queue: float, candidate: RouteCandidate) -> float:
    """Return FlowGuard's S of a candidate, given its C as `cached` and its Q as `queue`."""
    a1, a2, a3, a4 = weights
    load = candidate.decode.load
    return a1 * cached + a2 * (1 - candidate.memory) + a3 * (1 - queue) + a4 * (1 - load)


def highest_score(
    candidates: Sequence[RouteCandidate], scores: Sequence[float | None], turn: int
) -> Decision:
    """Choose the candidate with the highest of `scores`, among equal ones the shortest queue. A score of None
    is lower than all others; at least one is not None."""
    keys = [
        (-inf if score is None else score, -candidate.prefill.queued)
        for score, candidate in zip(scores, candidates, strict=True)
    ]
    return Decision(best(keys, turn), tuple(scores), "highest score")
