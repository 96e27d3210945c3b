"""Chunk sizes: how many tokens of which prompts go into a step, in a batch with decoding sequences.

First comes what is due: a prompt with a deadline for its first token gets as many tokens in each step as it
needs to meet it. A prompt without a deadline that holds memory already gets as many as it needs to finish
eventually.

Beyond that, prompt tokens compete with decoding for the time of the step: a token of a prompt is worth its
share of the expected output, a decoded token is worth one. Prompt streams are sent early for the sake of
their first token: where there is one, all prompts are served in order, as fast as targets allow.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from streamserve.scheduling.ordering import PATIENCE
from streamserve.speculation.slo import Need

MARGIN = 3
"""Steps before its deadline by which a prompt is to be done: steps may become longer than predicted."""
ROUNDS = 4
"""Iterations of computing what is due with the time of the resulting step."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Numbers of prompt tokens that are compared, and the ends of prompts too: cost curves are staircases."""


class Prompt(NamedTuple):
    """A prompt. `remaining` of `length` tokens have no KV yet; its cached prefix does not count in either. It
    was complete `waited` seconds ago, and its first token is due in `due_in` seconds, if it has a deadline.
    `running`: it holds blocks. `streamed`: it is, or was, a prompt stream."""

    remaining: int
    length: int
    waited: float = 0.0
    due_in: float | None = None
    running: bool = False
    streamed: bool = False


class Chunk(NamedTuple):
    """The `tokens` of a prompt in a step; the first `due` of them are computed whatever else might be worth
    more."""

    tokens: int
    due: int


class Company(NamedTuple):
    """The step that prompts are to join: sequences with these `needs` decode in it, with one query token
    each. `seconds` is the time of a step by query tokens, `budget` the most query tokens of all, `most` the
    most of one prompt. A step yields `pace` tokens for a decoding sequence on average."""

    needs: Sequence[Need]
    seconds: Callable[[int], float]
    budget: int
    most: int
    pace: float = 1.0


def chunks(
    prompts: Sequence[Prompt], company: Company, mean_output: float, share: float | None = None
) -> list[Chunk]:
    """Return a chunk for each of the `prompts`, which come in order of urgency.

    Beyond what is due, prompts get the number of tokens that maximises expected output per second of the
    step, an output having `mean_output` tokens on average; or with a `share`, this share of the budget.
    Neither makes the step longer than the decoding sequences' targets allow.
    """
    rows = len(company.needs)
    due = due_tokens(prompts, company)
    rest = [min(prompt.remaining, company.most) - least for prompt, least in zip(prompts, due, strict=True)]
    worth = [_worth(prompt, mean_output) for prompt in prompts]
    if any(prompt.streamed for prompt in prompts):
        worth = [1.0] * len(prompts)
    turns = sorted(range(len(prompts)), key=lambda i: -worth[i] if share is None else i)
    ends = list(accumulate((rest[i] for i in turns), initial=0))
    room = (company.budget - rows if share is None else ceil(share * company.budget)) - sum(due)
    room = min(room, company.budget - rows - sum(due), ends[-1])
    base = rows + sum(due)
    longest = _bearable(company)
    sizes = {size for size in (*SIZES, *ends, room) if 0 < size <= room}
    able = [0, *(size for size in sorted(sizes) if company.seconds(base + size) <= longest)]

    def rate(size: int) -> float:
        gain = sum(worth[i] * min(rest[i], max(size - end, 0)) for i, end in zip(turns, ends, strict=False))
        return (rows * company.pace + gain) / max(company.seconds(base + size), 1e-9)

    extra = able[-1] if share is not None else max(able, key=rate)
    found = list(due)
    for i, end in zip(turns, ends, strict=False):
        found[i] += min(rest[i], max(extra - end, 0))
    return [Chunk(tokens, least) for tokens, least in zip(found, due, strict=True)]


def due_tokens(prompts: Sequence[Prompt], company: Company) -> list[int]:
    """Return how many tokens each of the `prompts` must get now to have its first token in time: with T the
    time of the step with all that is due, remaining * T / time left. Where the budget is too small, the last
    get none. An infeasible deadline is not pursued: such a prompt is treated as one without a deadline."""
    rows, seconds = len(company.needs), company.seconds
    whole = seconds(rows + company.most) / company.most
    idle = not any(prompt.running for prompt in prompts)
    times = []
    for number, prompt in enumerate(prompts):
        if prompt.due_in is not None and prompt.remaining * whole <= prompt.due_in:
            times.append(max(prompt.due_in - MARGIN * seconds(rows), 1e-6))
        elif prompt.running or (idle and not number):
            times.append(max(PATIENCE - prompt.waited, PATIENCE / 10))
        else:
            times.append(inf)
    due = [0] * len(prompts)
    for _ in range(ROUNDS):
        now = seconds(max(rows + sum(due), 1))  # an empty step would take no time, and yield nothing
        left = max(company.budget - rows, 0)
        again = []
        for prompt, time in zip(prompts, times, strict=True):
            wanted = ceil(min(prompt.remaining * now / time, prompt.remaining))
            again.append(min(wanted, company.most, left))
            left -= again[-1]
        if again == due:
            break
        due = again
    return due


def _worth(prompt: Prompt, mean_output: float) -> float:
    """Return the expected output for each token of the prompt, which grows with its waiting time."""
    return mean_output / prompt.length * (1 + prompt.waited / PATIENCE)


def _bearable(company: Company) -> float:
    """Return the longest step that endangers no target: requests ahead of their targets have slack, those
    that lag must not fall back further. Targets that the step would miss without any prompt are ignored."""
    alone = company.seconds(len(company.needs))
    limits = (
        max(need.slack(company.pace), need.tpot * company.pace)
        for need in company.needs
        if need.tpot is not None
    )
    return min((limit for limit in limits if limit >= alone), default=inf)
