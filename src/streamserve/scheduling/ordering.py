"""Who goes first: the orders in which an engine serves its sequences, by name.

    slo            by latency target, then by arrival; one step holds what decodes and chunks of prompts
    arrival        by arrival, whether a prompt is complete or not: streaming without a policy (vLLM's)
    lcas           the latest chunk first, but complete prompts that waited too long before all (Stream2LLM)
    mcps           most computed first (Stream2LLM)
    chunked        by arrival; likewise, blind to targets (Sarathi-Serve)
    prefill-first  by arrival; a step holds prompts, or what decodes while no prompt can run (vLLM's first)
    fcfs           by arrival; the batch stays as small as the strictest target of those that decode demands
    stta           shortest time to attain: as fcfs, by the time that is left until a target is missed
                   (both as AdaServe, section 6.3, compares itself with them)

In slo, fcfs and stta complete prompts come before those that are still arriving, as in Stream2LLM's FCFS.
In every order a lower `priority` goes first. `rank` is about places and memory: the last lose theirs to the
first, so it must not change back and forth. `turns` is about the rows of one step.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, NamedTuple, get_args

from streamserve.speculation.slo import NO_NEED, Need

Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta", "arrival", "lcas", "mcps"]
ORDERS: tuple[Order, ...] = get_args(Order)

PATIENCE = 10.0
"""A request without a target for its first token, or with one that is missed, goes where one with a target of
so many seconds would: later than the urgent ones, but not forever."""

STRETCH = 10.0
"""Likewise, for each second that a prompt that came in pieces still takes to compute: who needs little does
not wait for who needs much, yet who has waited that much longer goes first."""


class Candidate(NamedTuple):
    """What is known of a sequence that could be part of a step. Times are seconds on the engine's clock.

    `remaining` prompt tokens have no KV yet, which takes some `work` seconds if it came in
    pieces; `computed` tokens have. A `complete` prompt has arrived as a
    whole, the latest piece of it at `last_chunk_at`, and was asked to be answered at `asked_at` (None: on
    arrival). Of one that is still arriving, so many of the latest edits in a row kept the token that
    would be computed next as it is `steady`. `deadline` is when its first token is wanted, as long as that
    has not come; from then on `need` is its target for the following ones. `running`: it holds blocks.
    `resting`: it waits for more of its prompt, with nothing to compute.
    """

    arrival: float
    priority: int = 0
    remaining: int = 0
    work: float = 0.0
    computed: int = 0
    running: bool = False
    decoding: bool = False
    complete: bool = True
    last_chunk_at: float = 0.0
    asked_at: float | None = None
    steady: int = 0
    deadline: float | None = None
    need: Need = NO_NEED
    resting: bool = False


def rank(order: Order, candidates: Sequence[Candidate], now: float) -> list[int]:
    """The candidates' indices, the first to be served first; equals stay in the given order. Where complete
    prompts come first, those that rest come last: memory is for who has something to compute."""
    key, apart = _KEYS.get(order, _by_arrival), order in COMPLETE_FIRST

    places = [
        (one.priority, apart and not one.complete, apart and one.resting, key(one, now)) for one in candidates
    ]
    return sorted(range(len(candidates)), key=places.__getitem__)


def turns(order: Order, candidates: Sequence[Candidate], ranked: Sequence[int], now: float) -> list[int]:
    """In which turn those `ranked`, which may be some of the candidates, are given rows of a step. Where none
    is decoded beside a prompt, prompts have the first turns, else what decodes has; in batches that are
    capped, neither."""
    if order == "stta":
        left = [time_to_attain(one, now) for one in candidates]
        ranked = sorted(ranked, key=lambda i: (candidates[i].priority, not candidates[i].complete, left[i]))
    elif order not in CAPPED:
        late = order == EXCLUSIVE
        ranked = sorted(ranked, key=lambda i: candidates[i].decoding == late)
    return _steady_first(candidates, ranked) if order in COMPLETE_FIRST else list(ranked)


def _steady_first(candidates: Sequence[Candidate], ranked: Sequence[int]) -> list[int]:
    """Arriving prompts of one priority change places: what will most likely last is computed first."""
    found = list(ranked)
    arriving = [place for place, i in enumerate(ranked) if not candidates[i].complete]
    best = sorted(
        (ranked[place] for place in arriving), key=lambda i: (candidates[i].priority, -candidates[i].steady)
    )
    for place, i in zip(arriving, best, strict=True):
        found[place] = i
    return found


EXCLUSIVE: Order = "prefill-first"
"""The order where a step with a prompt in it decodes nothing."""

COMPLETE_FIRST: tuple[Order, ...] = ("slo", "fcfs", "stta")
"""The orders where a prompt that is still arriving waits for all complete ones: nobody reads on yet."""

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


def _by_arrival(candidate: Candidate, now: float) -> float:
    return candidate.arrival


def _by_asked(candidate: Candidate, now: float) -> float:
    """Complete prompts since when they are, for that is since when somebody waits."""
    asked = candidate.asked_at
    return candidate.arrival if asked is None or not candidate.complete else asked


def _by_chunk(candidate: Candidate, now: float) -> float:
    """The latest chunk first. Who has waited longer than PATIENCE with a complete prompt comes before all,
    the oldest first."""
    if candidate.complete and now - candidate.last_chunk_at >= PATIENCE:
        return candidate.last_chunk_at - 2 * abs(now) - 1.0
    return -candidate.last_chunk_at


def _by_computed(candidate: Candidate, now: float) -> float:
    return -candidate.computed


def _due(candidate: Candidate, now: float) -> float:
    """When it is due: with a target for its further tokens, when it came."""
    asked = _by_asked(candidate, now)
    if candidate.need.tpot is not None:
        return asked
    deadline = candidate.deadline
    if deadline is not None and deadline > now:
        return deadline
    return asked + PATIENCE + STRETCH * candidate.work


def time_to_attain(candidate: Candidate, now: float) -> float:
    """How long until a target is missed. A prompt without one is wanted PATIENCE after it came."""
    if candidate.decoding or candidate.need.tpot is not None:
        return candidate.need.slack(1.0)
    return (_by_asked(candidate, now) + PATIENCE if candidate.deadline is None else candidate.deadline) - now


_KEYS: dict[Order, Callable[[Candidate, float], float]] = {
    "slo": _due,
    "fcfs": _by_asked,
    "stta": _by_asked,
    "lcas": _by_chunk,
    "mcps": _by_computed,
}
