"""The orders in which an engine serves its sequences, by name.

    slo            by latency target, then by arrival; one step mixes decoding and prompt chunks
    arrival        by arrival, whether a prompt is complete or not: streaming without a policy (vLLM's)
    lcas           the latest chunk first, but complete prompts past the maximum wait before all (Stream2LLM)
    mcps           most computed first (Stream2LLM)
    chunked        by arrival; mixes likewise, blind to targets (Sarathi-Serve)
    prefill-first  by arrival; a step holds prompts, or decodes while no prompt can run (vLLM's first)
    fcfs           by arrival; the batch stays as small as the strictest target of decoding sequences demands
    stta           shortest time to attain: as fcfs, by the time left until a target is missed
                   (both are baselines of AdaServe, section 6.3)

In slo, fcfs and stta complete prompts come before prompt streams, as in Stream2LLM's FCFS. In every order a
lower `priority` value goes first. `rank` decides about sequence slots and memory: the last lose theirs to the
first, so it must not change back and forth. `service_order` decides about the query tokens of one step.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, NamedTuple, get_args

from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta", "arrival", "lcas", "mcps"]
ORDERS: tuple[Order, ...] = get_args(Order)

MAX_WAIT = 10.0
"""Maximum wait in seconds: a request without a target for its first token, or with one that is missed, is
ranked like one with a target of this many seconds. It comes after urgent requests, but is not starved."""

WAIT_PER_WORK = 10.0
"""Additional seconds, as in MAX_WAIT, for each second of computing that a prompt stream still needs: requests
with little left do not wait for those with much, and the latter still age."""


class Candidate(NamedTuple):
    """What is known of a sequence that could be part of a step. Times are seconds on the engine's clock.

    * `remaining`: prompt tokens without KV, which take about `prefill_seconds` to compute if the prompt is or
      was a stream.
    * `computed`: tokens with KV.
    * `complete`: whether all of the prompt has arrived, its latest part at `last_chunk_at`. It was complete
      at `completed_at` (None: on arrival).
    * `edit_stability`: of a prompt stream, the number of its latest edits in a row that retained the token to
      compute next.
    * `deadline`: when its first token is due, until that has been generated; from then on `requirement` is
      its target for the following tokens.
    * `running`: it holds blocks.
    * `idle`: it has nothing to compute until more of its prompt arrives.
    """

    arrival: float
    priority: int = 0
    remaining: int = 0
    prefill_seconds: float = 0.0
    computed: int = 0
    running: bool = False
    decoding: bool = False
    complete: bool = True
    last_chunk_at: float = 0.0
    completed_at: float | None = None
    edit_stability: int = 0
    deadline: float | None = None
    requirement: LatencyRequirement = NO_REQUIREMENT
    idle: bool = False


def rank(order: Order, candidates: Sequence[Candidate], now: float) -> list[int]:
    """Return the candidates' indices, highest rank first; equals stay in the given order. Where complete
    prompts come first, idle ones come last: memory is for sequences with something to compute."""
    key, complete_first = _KEYS.get(order, _by_arrival), order in COMPLETE_FIRST

    keys = [
        (
            candidate.priority,
            complete_first and not candidate.complete,
            complete_first and candidate.idle,
            key(candidate, now),
        )
        for candidate in candidates
    ]
    return sorted(range(len(candidates)), key=keys.__getitem__)


def service_order(
    order: Order, candidates: Sequence[Candidate], ranked: Sequence[int], now: float
) -> list[int]:
    """Return the service order of those `ranked`, which may be some of the candidates, for a step's query
    tokens. With the exclusive order prompts come first, otherwise decoding sequences; in capped batches
    neither do."""
    if order == "stta":
        left = [time_to_attain(candidate, now) for candidate in candidates]
        ranked = sorted(ranked, key=lambda i: (candidates[i].priority, not candidates[i].complete, left[i]))
    elif order not in CAPPED:
        exclusive = order == EXCLUSIVE
        ranked = sorted(ranked, key=lambda i: candidates[i].decoding == exclusive)
    return _edit_stable_first(candidates, ranked) if order in COMPLETE_FIRST else list(ranked)


def _edit_stable_first(candidates: Sequence[Candidate], ranked: Sequence[int]) -> list[int]:
    """Reorder the prompt streams of one priority among their positions: the most edit-stable is computed
    first."""
    reordered = list(ranked)
    positions = [position for position, i in enumerate(ranked) if not candidates[i].complete]
    most_stable = sorted(
        (ranked[position] for position in positions),
        key=lambda i: (candidates[i].priority, -candidates[i].edit_stability),
    )
    for position, i in zip(positions, most_stable, strict=True):
        reordered[position] = i
    return reordered


EXCLUSIVE: Order = "prefill-first"
"""The order where a step with a prompt in it decodes nothing."""

COMPLETE_FIRST: tuple[Order, ...] = ("slo", "fcfs", "stta")
"""The orders where a prompt stream is deferred until all complete prompts are served: no client waits for its
output yet."""

CAPPED: tuple[Order, ...] = ("fcfs", "stta")
"""The orders that bound the query tokens of a step by `batch_cap`."""


def batch_cap(requirements: Sequence[LatencyRequirement], step: Callable[[int], float], limit: int) -> int:
    """Return the most query tokens, from 1 to `limit`, of a step that meets the strictest target among
    `requirements`; `step(n)` is the seconds of a step with n query tokens, which never fall with n."""
    strictest = min(
        (requirement.tpot for requirement in requirements if requirement.tpot is not None), default=inf
    )
    if step(limit) <= strictest:
        return limit
    low, high = 1, limit  # the cap is at least low and below high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step(middle) <= strictest else (low, middle)
    return low


def _by_arrival(candidate: Candidate, now: float) -> float:
    return candidate.arrival


def _by_completion(candidate: Candidate, now: float) -> float:
    """Order complete prompts by completion time, since the client waits from then; others by arrival."""
    completed_at = candidate.completed_at
    return candidate.arrival if completed_at is None or not candidate.complete else completed_at


def _by_chunk(candidate: Candidate, now: float) -> float:
    """Order by the latest chunk, newest first. Complete prompts past the maximum wait come before all, oldest
    first."""
    if candidate.complete and now - candidate.last_chunk_at >= MAX_WAIT:
        return candidate.last_chunk_at - 2 * abs(now) - 1.0
    return -candidate.last_chunk_at


def _by_computed(candidate: Candidate, now: float) -> float:
    return -candidate.computed


def _due(candidate: Candidate, now: float) -> float:
    """Return when the candidate is due; with a target for its further tokens, when its prompt was
    complete."""
    completed_at = _by_completion(candidate, now)
    if candidate.requirement.tpot is not None:
        return completed_at
    deadline = candidate.deadline
    if deadline is not None and deadline > now:
        return deadline
    return completed_at + MAX_WAIT + WAIT_PER_WORK * candidate.prefill_seconds


def time_to_attain(candidate: Candidate, now: float) -> float:
    """Return the seconds until a target is missed. A prompt without one is due PATIENCE seconds after it was
    complete."""
    if candidate.decoding or candidate.requirement.tpot is not None:
        return candidate.requirement.slack(1.0)
    return (
        _by_completion(candidate, now) + MAX_WAIT if candidate.deadline is None else candidate.deadline
    ) - now


_KEYS: dict[Order, Callable[[Candidate, float], float]] = {
    "slo": _due,
    "fcfs": _by_completion,
    "stta": _by_completion,
    "lcas": _by_chunk,
    "mcps": _by_computed,
}
