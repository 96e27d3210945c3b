"""Which prompts are taken in, so that those who decode with a latency target can stay on it.

A prompt that is computed becomes a request that decodes, and makes every step of the others longer. Where
their targets, and its own, could not all be kept from then on, it waits: so some are served as they asked,
where otherwise nobody would be. Who holds memory already goes on, whatever comes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from streamserve.speculation.outlook import Means
from streamserve.speculation.shapes import expected_tokens

MOST_ROWS = 4096
"""A step with more rows than this is no step."""
HEADROOM = 0.9
"""Share of the guesses' expected tokens that is counted on: they are right in streaks."""


class Request(NamedTuple):
    """One that decodes, or a prompt: its target for the time per output token in seconds (None: it has none,
    inf: it is past meeting any), and its priority, lower before higher. `remaining` tokens of a prompt are to
    be computed in `due_in` seconds, if there is a time for that. `forced`: it has waited enough, and goes
    whatever that does."""

    tpot: float | None
    remaining: int = 0
    due_in: float | None = None
    priority: int = 0
    forced: bool = False

    @property
    def pace(self) -> float:
        """Tokens of it that are due in each second."""
        return self.remaining / max(self.due_in, 1e-3) if self.due_in is not None else 0.0


def counted_on(cover: float, depth: int) -> float:
    """Tokens that a step brings one request with a chain of so many guesses, of which `cover` are right."""
    return 1.0 + HEADROOM * (expected_tokens(cover, depth) - 1.0)


def sustainable(counts: Mapping[float | None, int], means: Means, prompts: float = 0.0) -> bool:
    """Whether so many requests with these targets stay on them if they decode together: is there a step of S
    seconds in which each has the shortest chain that brings it S / tpot tokens? `prompts` rows a second are
    due of those that have begun, or as many as there were lately, whichever is more."""
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
    """Which `prompts` are taken in beside those `present`, which decode or have begun. Where not all can be,
    those that there is least to compute of go first, so that the most are served as they asked; those that
    are past it come last. Where there is nobody, one is taken in all the same. Nobody is held up by requests
    of lesser priority, nor by a target that could not even be kept alone."""
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
