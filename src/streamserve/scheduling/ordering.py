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
first, so it must not change back and forth. `turns` decides about the query tokens of one step.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, NamedTuple, get_args

from streamserve.speculation.slo import NO_NEED, Need

Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta", "arrival", "lcas", "mcps"]
ORDERS: tuple[Order, ...] = get_args(Order)

PATIENCE = 10.0
"""Maximum wait in seconds: a request without a target for its first token, or with one that is missed, is
ranked like one with a target of this many seconds. It comes after urgent requests, but is not starved."""

STRETCH = 10.0
"""Additional seconds, as in PATIENCE, for each second of computing that a prompt stream still needs: requests
with little left do not wait for those with much, and the latter still age."""


class Candidate(NamedTuple):
    """What is known of a sequence that could be part of a step. Times are seconds on the engine's clock.

    * `remaining`: prompt tokens without KV, which take about `work` seconds to compute if the prompt is or
      was a stream.
    * `computed`: tokens with KV.
    * `complete`: whether all of the prompt has arrived, its latest part at `last_chunk_at`. It was complete
      at `asked_at` (None: on arrival).
    * `steady`: edit stability of a prompt stream, the number of its latest edits in a row that retained the
      token to compute next.
    * `deadline`: when its first token is due, until that has been generated; from then on `need` is its
      target for the following tokens.
    * `running`: it holds blocks.
    * `resting`: it is idle, with nothing to compute until more of its prompt arrives.
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
    """Return the candidates' indices, highest rank first; equals stay in the given order. Where complete
    prompts come first, idle ones come last: memory is for sequences with something to compute."""
    key, apart = _KEYS.get(order, _by_arrival), order in COMPLETE_FIRST

    places = [
        (one.priority, apart and not one.complete, apart and one.resting, key(one, now)) for one in candidates
    ]
    return sorted(range(len(candidates)), key=places.__getitem__)


def turns(order: Order, candidates: Sequence[Candidate], ranked: Sequence[int], now: float) -> list[int]:
    """Return the service order of those `ranked`, which may be some of the candidates, for a step's query
    tokens. With the exclusive order prompts come first, otherwise decoding sequences; in capped batches
    neither do."""
    if order == "stta":
        left = [time_to_attain(one, now) for one in candidates]
        ranked = sorted(ranked, key=lambda i: (candidates[i].priority, not candidates[i].complete, left[i]))
    elif order not in CAPPED:
        late = order == EXCLUSIVE
        ranked = sorted(ranked, key=lambda i: candidates[i].decoding == late)
    return _steady_first(candidates, ranked) if order in COMPLETE_FIRST else list(ranked)


def _steady_first(candidates: Sequence[Candidate], ranked: Sequence[int]) -> list[int]:
    """Reorder the prompt streams of one priority among their positions: the most edit-stable is computed
    first."""
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
"""The orders where a prompt stream is deferred until all complete prompts are served: no client waits for its
output yet."""

CAPPED: tuple[Order, ...] = ("fcfs", "stta")
"""The orders that bound the query tokens of a step by `batch_cap`."""


def batch_cap(needs: Sequence[Need], step: Callable[[int], float], most: int) -> int:
    """Return the most query tokens, from 1 to `most`, of a step that meets the strictest target among
    `needs`; `step(n)` is the seconds of a step with n query tokens, which never fall with n."""
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
    """Order complete prompts by completion time, since the client waits from then; others by arrival."""
    asked = candidate.asked_at
    return candidate.arrival if asked is None or not candidate.complete else asked


def _by_chunk(candidate: Candidate, now: float) -> float:
    """Order by the latest chunk, newest first. Complete prompts past the maximum wait come before all, oldest
    first."""
    if candidate.complete and now - candidate.last_chunk_at >= PATIENCE:
        return candidate.last_chunk_at - 2 * abs(now) - 1.0
    return -candidate.last_chunk_at


def _by_computed(candidate: Candidate, now: float) -> float:
    return -candidate.computed


def _due(candidate: Candidate, now: float) -> float:
    """Return when the candidate is due; with a target for its further tokens, when its prompt was
    complete."""
    asked = _by_asked(candidate, now)
    if candidate.need.tpot is not None:
        return asked
    deadline = candidate.deadline
    if deadline is not None and deadline > now:
        return deadline
    return asked + PATIENCE + STRETCH * candidate.work


def time_to_attain(candidate: Candidate, now: float) -> float:
    """Return the seconds until a target is missed. A prompt without one is due PATIENCE seconds after it was
    complete."""
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
