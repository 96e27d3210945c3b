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
from typing import Literal, get_args

from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement

Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta", "arrival", "lcas", "mcps"]
ORDERS: tuple[Order, ...] = get_args(Order)

MAX_WAIT = 10.0
"""Maximum wait in seconds: a request without a target for its first token, or with one that is missed, is
ranked like one with a target of this many seconds. It comes after urgent requests, but is not starved."""

WAIT_PER_WORK = 10.0
"""Additional seconds, as in MAX_WAIT, for each second of computing that a prompt stream still needs: requests
with little left do not wait for those with much, and the latter still age."""


def rank(order: Order, views: Sequence[RequestView], now: float) -> list[int]:
    """Return the requests' indices, highest rank first; equals stay in the given order. Where complete
    prompts come first, idle ones come last: memory is for sequences with something to compute."""
    key, complete_first = _KEYS.get(order, _by_arrival), order in COMPLETE_FIRST

    keys = [
        (
            view.priority,
            complete_first and not view.complete,
            complete_first and view.idle,
            key(view, now),
        )
        for view in views
    ]
    return sorted(range(len(views)), key=keys.__getitem__)


def service_order(order: Order, views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    """Return the service order of those `ranked`, which may be some of the requests, for a step's query
    tokens. With the exclusive order prompts come first, otherwise decoding sequences; in capped batches
    neither do."""
    if order == "stta":
        left = [time_to_attain(view, now) for view in views]
        ranked = sorted(ranked, key=lambda i: (views[i].priority, not views[i].complete, left[i]))
    elif order not in CAPPED:
        exclusive = order == EXCLUSIVE
        ranked = sorted(ranked, key=lambda i: views[i].decoding == exclusive)
    return _edit_stable_first(views, ranked) if order in COMPLETE_FIRST else list(ranked)


def _edit_stable_first(views: Sequence[RequestView], ranked: Sequence[int]) -> list[int]:
    """Reorder the prompt streams of one priority among their positions: the most edit-stable is computed
    first."""
    reordered = list(ranked)
    positions = [position for position, i in enumerate(ranked) if not views[i].complete]
    most_stable = sorted(
        (ranked[position] for position in positions),
        key=lambda i: (views[i].priority, -views[i].edit_stability),
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


def _by_arrival(view: RequestView, now: float) -> float:
    return view.arrival


def _by_completion(view: RequestView, now: float) -> float:
    """Order complete prompts by completion time, since the client waits from then; others by arrival."""
    return view.complete_since


def _by_chunk(view: RequestView, now: float) -> float:
    """Order by the latest chunk, newest first. Complete prompts past the maximum wait come before all, oldest
    first."""
    if view.complete and now - view.last_chunk_at >= MAX_WAIT:
        return view.last_chunk_at - 2 * abs(now) - 1.0
    return -view.last_chunk_at


def _by_computed(view: RequestView, now: float) -> float:
    return -view.computed


def _due(view: RequestView, now: float) -> float:
    """Return when the request is due; with a target for its further tokens, when its prompt was
    complete."""
    completed_at = view.complete_since
    if view.requirement.tpot is not None:
        return completed_at
    deadline = view.deadline
    if deadline is not None and deadline > now:
        return deadline
    return completed_at + MAX_WAIT + WAIT_PER_WORK * view.prefill_seconds


def time_to_attain(view: RequestView, now: float) -> float:
    """Return the seconds until a target is missed. A prompt without one is due MAX_WAIT seconds after it was
    complete."""
    if view.decoding or view.requirement.tpot is not None:
        return view.requirement.slack(1.0)
    return (view.complete_since + MAX_WAIT if view.deadline is None else view.deadline) - now


_KEYS: dict[Order, Callable[[RequestView, float], float]] = {
    "slo": _due,
    "fcfs": _by_completion,
    "stta": _by_completion,
    "lcas": _by_chunk,
    "mcps": _by_computed,
}
