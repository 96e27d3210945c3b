"""SLO admission: which prompts may begin, so that decoding requests with a latency target can stay on it.

A computed prompt becomes a decoding request, and makes every step of the others longer. Where their targets
and its own could not all be met from then on, it waits: so some requests meet their targets where otherwise
none would. A request that already holds memory always continues.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from streamserve.speculation.outlook import Means
from streamserve.speculation.shapes import expected_tokens

MAX_QUERY_TOKENS = 4096
"""Most query tokens of a step that are considered."""
HEADROOM = 0.9
"""Share of the draft tokens' expected accepted tokens that is counted on: acceptance comes in streaks."""


class Request(NamedTuple):
    """A decoding request, or a prompt. `tpot` is its target for the time per output token in seconds (None:
    no target; inf: it can no longer meet one), `priority` is lower for more urgent requests. `remaining`
    tokens of a prompt are to be computed in `due_in` seconds, if it has a deadline. `aged_in`: it is aged in,
    whatever the effect."""

    tpot: float | None
    remaining: int = 0
    due_in: float | None = None
    priority: int = 0
    aged_in: bool = False

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens that are due in each second."""
        return self.remaining / max(self.due_in, 1e-3) if self.due_in is not None else 0.0


def discounted_tokens(acceptance: float, depth: int) -> float:
    """Return the tokens that a step yields for one request with a chain of `depth` draft tokens, each
    accepted with probability `acceptance`."""
    return 1.0 + HEADROOM * (expected_tokens(acceptance, depth) - 1.0)


def sustainable(counts: Mapping[float | None, int], means: Means, prompts: float = 0.0) -> bool:
    """Whether requests with these targets meet them if they decode together: is there a step of S seconds in
    which each has the shortest chain that yields S / tpot tokens? `counts` holds the number of requests by
    target. `prompts` tokens a second are due of the prompts that have begun, or as many as there were lately,
    whichever is more."""
    depths = dict.fromkeys(counts, 0)
    others = float(means.others)
    while True:
        drafting = sum(count for target, count in counts.items() if depths[target])
        query_tokens = sum(count * (1 + depths[target]) for target, count in counts.items())
        if query_tokens + others > MAX_QUERY_TOKENS:
            return False
        seconds = means.step(query_tokens + round(others)) + max(depths.values(), default=0) * means.draft(
            drafting
        )
        grew = others < prompts * seconds - 1
        others = max(others, prompts * seconds)
        for target in depths:
            if target is None or target == inf:
                continue
            while target * discounted_tokens(means.acceptance, depths[target]) < seconds:
                if depths[target] >= means.depth:
                    return False
                depths[target] += 1
                grew = True
        if not grew:
            return True


def admit(prompts: Sequence[Request], present: Sequence[Request], means: Means) -> list[bool]:
    """Return which `prompts` are admitted to a batch with the requests `present`, which decode or have begun.
    Where not all can be, those with the least to compute go first, so that the most targets are met; those
    that can no longer meet theirs come last. To an empty batch, one is always admitted. A prompt does not
    wait for requests of less urgent priority, nor for a target that is infeasible even alone."""
    alone = replace(means, others=0)
    targets = {request.tpot for request in (*present, *prompts)}
    feasible = {target: sustainable({target: 1}, alone) for target in targets}
    targets_by_priority = Counter(
        (request.priority, request.tpot if feasible[request.tpot] else inf) for request in present
    )
    begun = [request for request in present if request.remaining]
    admitted = [False] * len(prompts)
    for i in sorted(range(len(prompts)), key=lambda i: _admission_order(prompts[i])):
        prompt = prompts[i]
        target = prompt.tpot if feasible[prompt.tpot] else inf
        counts = Counter({target: 1})
        for (priority, other), count in targets_by_priority.items():
            if priority <= prompt.priority:
                counts[other] += count
        due = prompt.prompt_rate + sum(
            other.prompt_rate for other in begun if other.priority <= prompt.priority
        )
        if prompt.aged_in or counts.total() == 1 or sustainable(counts, means, due):
            targets_by_priority[prompt.priority, target] += 1
            begun.append(prompt)
            admitted[i] = True
    return admitted


def _admission_order(prompt: Request) -> tuple[bool, int, bool, int]:
    return (not prompt.aged_in, prompt.priority, prompt.tpot == inf, prompt.remaining)
