"""Chunk sizes: how many tokens of which prompts go into a step, in a batch with decoding sequences.

First comes what is due: a prompt with a deadline for its first token gets as many tokens in each step as it
needs to meet it. A prompt without a deadline that holds memory already gets as many as it needs to finish
eventually.

Beyond that, prompt tokens compete with decoding for the time of the step: a token of a prompt is worth its
share of the expected output, a decoded token is worth one. More urgent priorities come first, and decoding
sequences that they outrank do not compete with them, but keep their targets. Prompt streams are sent early
for the sake of their first token: where there is one, all prompts are served in order, as fast as targets
allow.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from streamserve.scheduling.ordering import MAX_WAIT
from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement

MARGIN = 3
"""Steps before its deadline by which a prompt is to be done: steps may become longer than predicted."""
ROUNDS = 4
"""Iterations of computing what is due with the time of the resulting step."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Numbers of prompt tokens that are compared, and the ends of prompts too: cost curves are staircases."""


class Chunk(NamedTuple):
    """The `tokens` of a prompt in a step; the first `due` of them are computed whatever else might be worth
    more."""

    tokens: int
    due: int


class DecodeBatch(NamedTuple):
    """The decoding sequences of the step that prompts are to join, with these latency `requirements` and one
    query token each. `step_seconds` is the time of a step by query tokens, `budget` the most query tokens of
    the step, `max_chunk` the most of one prompt. The step begins at `now` on the engine's clock, and yields
    `tokens_per_step` tokens for a decoding sequence on average. `priorities` are those of the decoding
    sequences; by default all are as urgent as any prompt."""

    requirements: Sequence[LatencyRequirement]
    step_seconds: Callable[[int], float]
    budget: int
    max_chunk: int
    now: float = 0.0
    tokens_per_step: float = 1.0
    priorities: Sequence[int] = ()

    def competing(self, priority: int) -> int:
        """Return how many decoding sequences a prompt of this priority does not outrank."""
        if not self.priorities:
            return len(self.requirements)
        return sum(1 for other in self.priorities if other <= priority)


def chunks(
    prompts: Sequence[RequestView], batch: DecodeBatch, mean_output: float, share: float | None = None
) -> list[Chunk]:
    """Return a chunk for each of the `prompts`, which come in order of urgency.

    Beyond what is due, prompts get the number of tokens that maximises expected output per second of the
    step, an output having `mean_output` tokens on average; or with a `share`, this share of the budget.
    Neither makes the step longer than the decoding sequences' targets allow. A prompt of a less urgent
    priority gets more than its due only once the more urgent ones have as much as they can use.
    """
    planned = [Chunk(0, 0)] * len(prompts)
    others, satisfied = 0, True
    for priority in sorted({prompt.priority for prompt in prompts}):
        level = [i for i, prompt in enumerate(prompts) if prompt.priority == priority]
        members = [prompts[i] for i in level]
        due = due_tokens(members, batch, others)
        given = _with_extra(members, due, batch, others, mean_output, share) if satisfied else due
        for i, tokens, least in zip(level, given, due, strict=True):
            planned[i] = Chunk(tokens, least)
            satisfied = satisfied and tokens == min(uncached(prompts[i]), batch.max_chunk)
        others += sum(given)
    return planned


def _with_extra(
    prompts: Sequence[RequestView],
    due: Sequence[int],
    batch: DecodeBatch,
    others: int,
    mean_output: float,
    share: float | None,
) -> list[int]:
    """Return how many tokens each of `prompts`, which have one priority, gets in a step: at least what is
    `due`. The step computes `others` tokens of prompts with more urgent priorities too."""
    decoding, competing = len(batch.requirements), batch.competing(prompts[0].priority)
    remainders = [
        min(uncached(prompt), batch.max_chunk) - least for prompt, least in zip(prompts, due, strict=True)
    ]
    values = [_value(prompt, mean_output, batch.now) for prompt in prompts]
    if any(prompt.streamed for prompt in prompts):
        values = [1.0] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: -values[i] if share is None else i)
    ends = list(accumulate((remainders[i] for i in order), initial=0))
    headroom = batch.budget - decoding if share is None else ceil(share * batch.budget)
    headroom = min(headroom, batch.budget - decoding) - others - sum(due)
    headroom = min(headroom, ends[-1])
    base = decoding + others + sum(due)
    longest = _longest_step(batch)
    sizes = {size for size in (*SIZES, *ends, headroom) if 0 < size <= headroom}
    feasible = [0, *(size for size in sorted(sizes) if batch.step_seconds(base + size) <= longest)]

    def rate(size: int) -> float:
        gain = sum(
            values[i] * min(remainders[i], max(size - end, 0)) for i, end in zip(order, ends, strict=False)
        )
        return (competing * batch.tokens_per_step + gain) / max(batch.step_seconds(base + size), 1e-9)

    extra = feasible[-1] if share is not None else max(feasible, key=rate)
    tokens = list(due)
    for i, end in zip(order, ends, strict=False):
        tokens[i] += min(remainders[i], max(extra - end, 0))
    return tokens


def due_tokens(prompts: Sequence[RequestView], batch: DecodeBatch, others: int = 0) -> list[int]:
    """Return how many tokens each of the `prompts` must get now to have its first token in time: with T the
    time of the step with all that is due, and `others` prompt tokens, remaining * T / time left. Where the
    budget is too small, the last get none. An infeasible deadline is not pursued: such a prompt is treated as
    one without a deadline."""
    decoding, step_seconds = len(batch.requirements) + others, batch.step_seconds
    whole = step_seconds(decoding + batch.max_chunk) / batch.max_chunk
    idle = not others and not any(prompt.running for prompt in prompts)
    remaining, times = [uncached(prompt) for prompt in prompts], []
    for number, prompt in enumerate(prompts):
        due_in = inf if prompt.deadline is None else prompt.deadline - batch.now
        if remaining[number] * whole <= due_in < inf:
            times.append(max(due_in - MARGIN * step_seconds(decoding), 1e-6))
        elif prompt.running or (idle and not number):
            times.append(max(MAX_WAIT - _waited(prompt, batch.now), MAX_WAIT / 10))
        else:
            times.append(inf)
    due = [0] * len(prompts)
    for _ in range(ROUNDS):
        now = step_seconds(max(decoding + sum(due), 1))  # an empty step would take no time, and yield nothing
        left = max(batch.budget - decoding, 0)
        again = []
        for tokens, time in zip(remaining, times, strict=True):
            required = ceil(min(tokens * now / time, tokens))
            again.append(min(required, batch.max_chunk, left))
            left -= again[-1]
        if again == due:
            break
        due = again
    return due


def uncached(prompt: RequestView) -> int:
    """Return how many tokens of a prompt are left to compute, at least 1. A cached prefix need not be, but
    only counts as computed once the prompt holds its blocks."""
    return max(1, prompt.remaining - (0 if prompt.running else prompt.cached))


def _value(prompt: RequestView, mean_output: float, now: float) -> float:
    """Return the expected output for each token of the prompt that was not cached, which grows with its
    waiting time."""
    tokens = max(uncached(prompt), prompt.length - prompt.cached)
    return mean_output / tokens * (1 + _waited(prompt, now) / MAX_WAIT)


def _waited(prompt: RequestView, now: float) -> float:
    """Return the seconds since a prompt was complete; 0 while it is a stream."""
    return max(0.0, now - prompt.complete_since) if prompt.complete else 0.0


def _longest_step(batch: DecodeBatch) -> float:
    """Return the longest step that endangers no target: requests ahead of their targets have slack, those
    that lag must not fall back further. Targets that the step would miss without any prompt are ignored."""
    alone = batch.step_seconds(len(batch.requirements))
    limits = (
        max(requirement.slack(batch.tokens_per_step), requirement.tpot * batch.tokens_per_step)
        for requirement in batch.requirements
        if requirement.tpot is not None
    )
    return min((limit for limit in limits if limit >= alone), default=inf)
