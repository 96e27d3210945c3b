"""How many tokens of which prompts go into a step, beside what decodes in it.

First what is due: a prompt whose first token is wanted at some time gets as many tokens in each step as bring
it there in time, and one that nobody set a time for, but that holds memory already, as many as bring it there
some day.
Beyond that, prompt tokens compete with what decodes for the time of the step: a token of a prompt is worth
the output that it leads to, a token that decodes is worth one. Prompts that are sent while they arrive are
sent so for the sake of their first token: where there is one, all come in turn, as fast as targets allow.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from streamserve.scheduling.ordering import PATIENCE
from streamserve.speculation.slo import Need

MARGIN = 3
"""Steps before its deadline by which a prompt is to be done: steps also become longer than was foreseen."""
ROUNDS = 4
"""How often what is due is computed anew with the time of the step that it would make."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Numbers of prompt tokens that are compared, besides the ends of prompts: cost curves are staircases."""


class Prompt(NamedTuple):
    """`remaining` of `length` tokens have no KV yet; what others had computed already does not count. It came
    `waited` seconds ago, and its first token is wanted in `due_in` seconds, if a time was set for that.
    `running`: it holds blocks. `streamed`: it is, or was, sent while it arrives."""

    remaining: int
    length: int
    waited: float = 0.0
    due_in: float | None = None
    running: bool = False
    streamed: bool = False


class Chunk(NamedTuple):
    """So many `tokens` of a prompt in a step, of which so many are `due` whatever else might pay more."""

    tokens: int
    due: int


class Company(NamedTuple):
    """The step that prompts are to join: sequences with these `needs` decode in it, each a row. `seconds` is
    the time of a step with so many rows, `budget` the most rows of all, `most` the most of one prompt; a step
    brings `pace` tokens to who decodes, on average."""

    needs: Sequence[Need]
    seconds: Callable[[int], float]
    budget: int
    most: int
    pace: float = 1.0


def chunks(
    prompts: Sequence[Prompt], company: Company, mean_output: float, share: float | None = None
) -> list[Chunk]:
    """A chunk for each of the `prompts`, which come in order of urgency.

    Beyond what is due, prompts get the number of tokens with the most expected output a second of step, an
    output having `mean_output` tokens on average; or with a `share`, this share of the budget. Neither makes
    the step longer than those who decode can bear and still meet their targets.
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
    """What each of the `prompts` must get now to have its first token in time: remaining * T / time left, T
    the time of the step with all that is due. Where the budget is too small, the last go without. What could
    not be in time with all of the budget is not chased: it is due as if nobody had set a time."""
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
        now = seconds(max(rows + sum(due), 1))  # no step at all would take no time, and bring nothing
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
    """Expected output for each token of the prompt, more the longer it has waited."""
    return mean_output / prompt.length * (1 + prompt.waited / PATIENCE)


def _bearable(company: Company) -> float:
    """The longest step that puts no target in danger: who is ahead of it can wait, who is behind must not
    fall back further. Targets that the step would miss without any prompt are beyond help from here."""
    alone = company.seconds(len(company.needs))
    limits = (
        max(need.slack(company.pace), need.tpot * company.pace)
        for need in company.needs
        if need.tpot is not None
    )
    return min((limit for limit in limits if limit >= alone), default=inf)
