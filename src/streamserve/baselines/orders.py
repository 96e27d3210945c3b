"""The orders of service by name: the default order, and baselines for comparison.

slo            by latency target, then by arrival; one step mixes decoding and prompt chunks
chunked        by arrival; mixes as slo does, without regard to targets (Sarathi-Serve)
prefill-first  by arrival; a step holds prompts, or decodes while no prompt can run (vLLM's first scheduler)
fcfs           by arrival; the strictest target of decoding sequences limits the batch size
stta           shortest time to attain: as fcfs, but ordered by the time left until a target is missed
               (both are baselines of AdaServe, section 6.3)
arrival        by arrival, whether a prompt is complete or not: streaming without a policy (vLLM's)
lcas           the latest chunk first; before all, complete prompts past the maximum wait (Stream2LLM)
mcps           most computed first (Stream2LLM)
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType

from streamserve.scheduling.ordering import MAX_WAIT, SLO, Order
from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement


def batch_cap(requirements: Sequence[LatencyRequirement], step: Callable[[int], float], limit: int) -> int:
    """Return the largest number of query tokens, from 1 to `limit`, with which a step meets the strictest
    target among `requirements`. `step(n)` is the seconds of a step with n query tokens; it never falls with
    n."""
    strictest = min(
        (requirement.tpot for requirement in requirements if requirement.tpot is not None), default=inf
    )
    if step(limit) <= strictest:
        return limit
    low, high = 1, limit  # invariant: the cap is at least low, and below high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step(middle) <= strictest else (low, middle)
    return low


def time_to_attain(view: RequestView, now: float) -> float:
    """Return the seconds until a target is missed. A prompt without a target is due MAX_WAIT seconds after it
    was complete."""
    if view.decoding or view.requirement.tpot is not None:
        return view.requirement.slack(1.0)
    return (view.complete_since + MAX_WAIT if view.deadline is None else view.deadline) - now


def _by_arrival(view: RequestView, now: float) -> float:
    return view.arrival


def _by_completion(view: RequestView, now: float) -> float:
    """Order complete prompts by completion time, since the client waits from then; order others by
    arrival."""
    return view.complete_since


def _by_chunk(view: RequestView, now: float) -> float:
    """Order by the latest chunk, newest first. Complete prompts past the maximum wait come before all others,
    oldest first."""
    if view.complete and now - view.last_chunk_at >= MAX_WAIT:
        return view.last_chunk_at - 2 * abs(now) - 1.0
    return -view.last_chunk_at


def _by_computed(view: RequestView, now: float) -> float:
    return -view.computed


def _as_ranked(views: Sequence[RequestView], ranked: Sequence[int], now: float) -> Sequence[int]:
    return ranked


def _prompts_first(views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    return sorted(ranked, key=lambda i: views[i].decoding)


def _by_time_to_attain(views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    return sorted(
        ranked, key=lambda i: (views[i].priority, not views[i].complete, time_to_attain(views[i], now))
    )


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "slo": SLO,
        "chunked": Order(_by_arrival),
        "prefill-first": Order(_by_arrival, serve=_prompts_first, exclusive=True),
        "fcfs": Order(_by_completion, complete_first=True, serve=_as_ranked, cap=batch_cap),
        "stta": Order(_by_completion, complete_first=True, serve=_by_time_to_attain, cap=batch_cap),
        "arrival": Order(_by_arrival),
        "lcas": Order(_by_chunk),
        "mcps": Order(_by_computed),
    }
)
"""The orders by name, as in the setting `order`."""
