"""Who goes first: the orders in which an engine serves its sequences, by name.

    slo            by latency target, then by arrival; one step holds what decodes and chunks of prompts
    chunked        by arrival; likewise, blind to targets (Sarathi-Serve)
    prefill-first  by arrival; a step holds prompts, or what decodes while no prompt can run (vLLM's first)
    fcfs           by arrival; the batch stays as small as the strictest target of those that decode demands
    stta           shortest time to attain: as fcfs, by the time that is left until a target is missed
                   (both as AdaServe, section 6.3, compares itself with them)

In every order a lower `priority` goes first. `rank` is about places and memory: the last lose theirs to the
first, so it must not change back and forth. `turns` is about the rows of one step.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, NamedTuple, get_args

from streamserve.policy.slo import NO_NEED, Need

Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta"]
ORDERS: tuple[Order, ...] = get_args(Order)

PATIENCE = 10.0
"""A request without a target for its first token, or with one that is missed, goes where one with a target of
so many seconds would: later than the urgent ones, but not forever."""


class Candidate(NamedTuple):
    """What is known of a sequence that could be part of a step. Times are seconds on the engine's clock.

    `remaining` prompt tokens have no KV yet, `computed` tokens have. A `complete` prompt has arrived as a
    whole, the latest piece of it at `last_chunk_at`. `deadline` is when its first token is wanted, as long as
    that has not come; from then on `need` is its target for the following ones. `running`: it holds blocks.
    """

    arrival: float
    priority: int = 0
    remaining: int = 0
    computed: int = 0
    running: bool = False
    decoding: bool = False
    complete: bool = True
    last_chunk_at: float = 0.0
    deadline: float | None = None
    need: Need = NO_NEED


def rank(order: Order, candidates: Sequence[Candidate], now: float) -> list[int]:
    """The candidates' indices, the first to be served first; equals stay in the given order."""
    when = [_due(one, now) if order == "slo" else one.arrival for one in candidates]
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].priority, when[i]))


def turns(order: Order, candidates: Sequence[Candidate], ranked: Sequence[int], now: float) -> list[int]:
    """In which turn the `ranked` ones are given rows of a step. Where none is decoded beside a prompt,
    prompts have the first turns, else what decodes has; in batches that are capped, neither."""
    if order == "stta":
        left = [time_to_attain(one, now) for one in candidates]
        return sorted(ranked, key=lambda i: (candidates[i].priority, left[i]))
    if order in CAPPED:
        return list(ranked)
    late = order == EXCLUSIVE
    return sorted(ranked, key=lambda i: candidates[i].decoding == late)


EXCLUSIVE: Order = "prefill-first"
"""The order where a step with a prompt in it decodes nothing."""

CAPPED: tuple[Order, ...] = ("fcfs", "stta")
"""The orders that bound the rows of a step by `batch_cap`."""


def batch_cap(needs: Sequence[Need], step: Callable[[int], float], most: int) -> int:
    """The most rows, up to `most`, of a step that keeps the strictest target among `needs`, at least one;
    `step` is the seconds of one with so many rows, which never fall with rows."""
    strictest = min((need.tpot for need in needs if need.tpot is not None), default=inf)
    if step(most) <= strictest:
        return most
    low, high = 1, most  # the cap is at least low and below high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step(middle) <= strictest else (low, middle)
    return low


def _due(candidate: Candidate, now: float) -> float:
    """When it is due: with a target for its further tokens, when it came."""
    if candidate.need.tpot is not None:
        return candidate.arrival
    deadline = candidate.deadline
    return deadline if deadline is not None and deadline > now else candidate.arrival + PATIENCE


def time_to_attain(candidate: Candidate, now: float) -> float:
    """How long until a target is missed. A prompt without one is wanted PATIENCE after it came."""
    if candidate.decoding or candidate.need.tpot is not None:
        return candidate.need.slack(1.0)
    return (candidate.arrival + PATIENCE if candidate.deadline is None else candidate.deadline) - now
