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

MOST_ROWS = 4096
"""Most query tokens of a step that are considered."""
HEADROOM = 0.9
"""Share of the draft tokens' expected accepted tokens that is counted on: acceptance comes in streaks."""


class Request(NamedTuple):
    """A decoding request, or a prompt. `tpot` is its target for the time per output token in seconds (None:
    no target; inf: it can no longer meet one), `priority` is lower for more urgent requests. `remaining`
    tokens of a prompt are to be computed in `due_in` seconds, if it has a deadline. `forced`: it is aged in,
    whatever the effect."""

    tpot: float | None
    remaining: int = 0
    due_in: float | None = None
    priority: int = 0
    forced: bool = False

    @property
    def pace(self) -> float:
        """Prompt tokens that are due in each second."""
        return self.remaining / max(self.due_in, 1e-3) if self.due_in is not None else 0.0


def counted_on(cover: float, depth: int) -> float:
    """Return the tokens that a step yields for one request with a chain of `depth` draft tokens, each
    accepted with probability `cover`."""
    return 1.0 + HEADROOM * (expected_tokens(cover, depth) - 1.0)


def sustainable(counts: Mapping[float | None, int], means: Means, prompts: float = 0.0) -> bool:
    """Whether requests with these targets meet them if they decode together: is there a step of S seconds in
    which each has the shortest chain that yields S / tpot tokens? `counts` holds the number of requests by
    target. `prompts` tokens a second are due of the prompts that have begun, or as many as there were lately,
    whichever is more."""
    depths = dict.fromkeys(counts, 0)
    others = float(means.others)
    while True:
        guessing = sum(count for target, count in counts.items() if depths[target])
        rows = sum(count * (1 + depths[target]) for target, count in counts.items())
        if rows + others > MOST_ROWS:
            return False
        seconds = means.step(rows + round(others)) + max(depths.values(), default=0) * means.draft(guessing)
        grown = others < prompts * seconds - 1
        others = max(others, prompts * seconds)
        for target in depths:
            if target is None or target == inf:
                continue
            while target * counted_on(means.cover, depths[target]) < seconds:
                if depths[target] >= means.depth:
                    return False
                depths[target] += 1
                grown = True
        if not grown:
            return True


def admitted(prompts: Sequence[Request], present: Sequence[Request], means: Means) -> list[bool]:
    """Return which `prompts` are admitted to a batch with those `present`, which decode or have begun. Where
    not all can be, those with the least to compute go first, so that the most targets are met; those that can
    no longer meet theirs come last. With none present, one is admitted in any case. A prompt is not held up
    by requests of less urgent priority, nor by a target that is infeasible even alone."""
    alone = replace(means, others=0)
    able = {target: sustainable({target: 1}, alone) for target in {one.tpot for one in (*present, *prompts)}}
    alike = Counter((one.priority, one.tpot if able[one.tpot] else inf) for one in present)
    begun = [one for one in present if one.remaining]
    found = [False] * len(prompts)
    for i in sorted(range(len(prompts)), key=lambda i: _turn(prompts[i])):
        one = prompts[i]
        target = one.tpot if able[one.tpot] else inf
        counts = Counter({target: 1})
        for (priority, other), count in alike.items():
            if priority <= one.priority:
                counts[other] += count
        due = one.pace + sum(other.pace for other in begun if other.priority <= one.priority)
        if one.forced or counts.total() == 1 or sustainable(counts, means, due):
            alike[one.priority, target] += 1
            begun.append(one)
            found[i] = True
    return found


def _turn(prompt: Request) -> tuple[bool, int, bool, int]:
    return (not prompt.forced, prompt.priority, prompt.tpot == inf, prompt.remaining)
