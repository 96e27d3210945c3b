"""Chunk sizes: how many tokens of each prompt go into a step, in a batch with decoding sequences.

Due tokens come first. In each step a prompt with a deadline for its first token gets the tokens that it needs
to meet the deadline. A prompt without a deadline that already holds memory gets the tokens that it needs to
finish within MAX_WAIT.

Further prompt tokens compete with decoding for the time of the step. A token of a prompt is worth its share
of the expected output, a decoded token is worth one. More urgent priorities come first. Decoding sequences of
a less urgent priority than a prompt do not compete with it, but their targets still limit the step.

Clients send prompt streams early to get the first token early. If a prompt is or was a stream, all prompts
are served in order, as fast as the targets allow.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from streamserve.scheduling.ordering import MAX_WAIT
from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement

MARGIN = 3
"""A prompt is planned to be done this many steps before its deadline: steps may become longer than
predicted."""
ROUNDS = 4
"""Maximum iterations of `due_tokens`: due tokens make the step longer, and a longer step makes more tokens
due."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Numbers of prompt tokens whose rates are compared, together with the ends of prompts. Cost curves are
staircases, so a local search could stop too early."""


class PrefillChunk(NamedTuple):
    """A prompt's part of one step: its number of `tokens`. The first `due` tokens are computed even if other
    tokens are worth more."""

    tokens: int
    due: int


class DecodeBatch(NamedTuple):
    """The decoding sequences of the step that prompts are to join; each has one query token.

    * `requirements`: their latency requirements.
    * `step_seconds`: seconds of a step by query tokens.
    * `budget`: maximum query tokens of the step; `max_chunk`: maximum query tokens of one prompt.
    * `now`: when the step begins, on the engine's clock.
    * `tokens_per_step`: mean tokens that a step yields for a decoding sequence.
    * `priorities`: the priorities of the decoding sequences; if empty, all are as urgent as any prompt.
    """

    requirements: Sequence[LatencyRequirement]
    step_seconds: Callable[[int], float]
    budget: int
    max_chunk: int
    now: float = 0.0
    tokens_per_step: float = 1.0
    priorities: Sequence[int] = ()

    def competing(self, priority: int) -> int:
        """Return the number of decoding sequences that a prompt of this priority does not outrank."""
        if not self.priorities:
            return len(self.requirements)
        return sum(1 for other in self.priorities if other <= priority)


def chunks(
    prompts: Sequence[RequestView], batch: DecodeBatch, mean_output: float, share: float | None = None
) -> list[PrefillChunk]:
    """Return a chunk for each of the `prompts`, which are in order of urgency.

    Beyond due tokens, prompts get the number of tokens that maximises expected output per second of the step;
    a prompt's output has `mean_output` tokens on average. With a `share`, they get this share of the budget
    instead. In both cases the step never takes longer than the decoding sequences' targets allow. A prompt of
    a less urgent priority gets more than its due tokens only if all more urgent prompts get their maximum.
    """
    planned = [PrefillChunk(0, 0)] * len(prompts)
    others, satisfied = 0, True
    for priority in sorted({prompt.priority for prompt in prompts}):
        level = [i for i, prompt in enumerate(prompts) if prompt.priority == priority]
        members = [prompts[i] for i in level]
        due = due_tokens(members, batch, others)
        given = _with_extra(members, due, batch, others, mean_output, share) if satisfied else due
        for i, tokens, least in zip(level, given, due, strict=True):
            planned[i] = PrefillChunk(tokens, least)
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
    """Return how many tokens each of `prompts` gets in a step: its `due` tokens, and perhaps extra tokens.
    All `prompts` have the same priority.

    The number of extra tokens maximises expected output per second of the step (`chunks`). With a `share`,
    extra tokens fill this share of the budget instead. The step also computes `others` tokens of prompts with
    more urgent priorities.
    """
    decoding, competing = len(batch.requirements), batch.competing(prompts[0].priority)
    remainders = [
        min(uncached(prompt), batch.max_chunk) - least for prompt, least in zip(prompts, due, strict=True)
    ]
    values = [_value(prompt, mean_output, batch.now) for prompt in prompts]
    if any(prompt.streamed for prompt in prompts):  # serve prompts in order: see the module's docstring
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
        """Return the expected output tokens a second with `size` prompt tokens beyond the due ones."""
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
    """Return how many tokens each of the `prompts` must get in this step to have its first token in time:
    remaining tokens * T / time left. T is the time of a step with all due tokens and `others` further prompt
    tokens. If the budget is too small, the last prompts get none. A prompt with an infeasible deadline is
    treated as a prompt without one."""
    decoding, step_seconds = len(batch.requirements) + others, batch.step_seconds
    whole = step_seconds(decoding + batch.max_chunk) / batch.max_chunk  # seconds a token in whole chunks
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
    """Return how many tokens of a prompt are left to compute, at least 1. The cached prefix of a prompt that
    is not running yet is subtracted here: `remaining` includes it until the prompt holds its blocks."""
    return max(1, prompt.remaining - (0 if prompt.running else prompt.cached))


def _value(prompt: RequestView, mean_output: float, now: float) -> float:
    """Return the value of computing a token of the prompt: the expected output divided by the prompt's
    uncached length. The value grows with the waiting time."""
    tokens = max(uncached(prompt), prompt.length - prompt.cached)
    return mean_output / tokens * (1 + _waited(prompt, now) / MAX_WAIT)


def _waited(prompt: RequestView, now: float) -> float:
    """Return the seconds since a prompt was complete; 0 while it is not complete."""
    return max(0.0, now - prompt.complete_since) if prompt.complete else 0.0


def _longest_step(batch: DecodeBatch) -> float:
    """Return the seconds of the longest step that endangers no target. Requests ahead of their target have
    slack; requests that lag must not fall back further. Targets that a step without prompts would miss are
    ignored."""
    alone = batch.step_seconds(len(batch.requirements))
    limits = (
        max(requirement.slack(batch.tokens_per_step), requirement.tpot * batch.tokens_per_step)
        for requirement in batch.requirements
        if requirement.tpot is not None
    )
    return min((limit for limit in limits if limit >= alone), default=inf)
