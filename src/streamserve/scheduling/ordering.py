"""The orders in which an engine serves its sequences: what an order is, and the default one.

In every order a lower `priority` value goes first. `rank` decides about sequence slots and memory: the last
lose theirs to the first, so it must not change back and forth. `service_order` decides about the query tokens
of one step. baselines/orders.py has the orders to compare with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement

MAX_WAIT = 10.0
"""Maximum wait in seconds: a request without a target for its first token, or with one that is missed, is
ranked like one with a target of this many seconds. It comes after urgent requests, but is not starved."""

WAIT_PER_WORK = 10.0
"""Additional seconds, as in MAX_WAIT, for each second of computing that a prompt stream still needs: requests
with little left do not wait for those with much, and the latter still age."""

BatchCap = Callable[[Sequence[LatencyRequirement], Callable[[int], float], int], int]
"""Takes the requirements of the decoding requests, the seconds of a step by query tokens, and the most query
tokens of a step. Returns how many this step may have."""


def decoding_first(views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    """Return those `ranked`, decoding sequences before prompts."""
    return sorted(ranked, key=lambda i: not views[i].decoding)


@dataclass(frozen=True)
class Order:
    """An order of service.

    * `key(view, now)`: the rank among requests of one priority, lowest first.
    * `complete_first`: complete prompts rank before prompt streams, which are deferred until those are served
      (no client waits for their output yet), and are served by edit stability.
    * `serve(views, ranked, now)`: the order of those ranked for the query tokens of a step.
    * `exclusive`: a step with a prompt in it decodes nothing.
    * `cap`: limits the query tokens of a step.
    * `by_targets`: chunks and the admission of prompts follow the latency targets (scheduling/prefill.py,
      slo_admission.py). Otherwise a chunk is as long as fits.
    """

    key: Callable[[RequestView, float], float]
    complete_first: bool = False
    serve: Callable[[Sequence[RequestView], Sequence[int], float], Sequence[int]] = decoding_first
    exclusive: bool = False
    cap: BatchCap | None = None
    by_targets: bool = False


def rank(order: Order, views: Sequence[RequestView], now: float) -> list[int]:
    """Return the requests' indices, highest rank first; equals stay in the given order. Idle prompt streams
    come last in every order, whatever their priority: memory is for sequences with something to compute."""
    key, complete_first = order.key, order.complete_first

    keys = [
        (view.idle, view.priority, complete_first and not view.complete, key(view, now)) for view in views
    ]
    return sorted(range(len(views)), key=keys.__getitem__)


def service_order(order: Order, views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    """Return the service order of those `ranked`, which may be some of the requests, for a step's query
    tokens."""
    served = order.serve(views, ranked, now)
    return _edit_stable_first(views, served) if order.complete_first else list(served)


def _edit_stable_first(views: Sequence[RequestView], ranked: Sequence[int]) -> list[int]:
    """Reorder the prompt streams of one priority among their positions: the most edit-stable is computed
    first."""
    reordered = list(ranked)
    positions = [position for position, i in enumerate(ranked) if not views[i].complete]
    most_stable = sorted(
        (ranked[position] for position in positions),
        key=lambda i: (views[i].idle, views[i].priority, -views[i].edit_stability),
    )
    for position, i in zip(positions, most_stable, strict=True):
        reordered[position] = i
    return reordered


def due(view: RequestView, now: float) -> float:
    """Return when the request is due; with a target for its further tokens, when its prompt was complete.
    A prompt stream that has time to spare is due later by its remaining work, as one without a target is:
    serving by deadline alone, those with little left would wait for those with much."""
    complete_since, work = view.complete_since, WAIT_PER_WORK * view.prefill_seconds
    if view.requirement.tpot is not None:
        return complete_since
    deadline = view.deadline
    if deadline is not None and deadline > now:
        return deadline + work if now + work < deadline else deadline
    return complete_since + MAX_WAIT + work


SLO = Order(due, complete_first=True, by_targets=True)
"""By latency target, then by arrival; one step mixes decoding and prompt chunks. Complete prompts come before
prompt streams, as in Stream2LLM's FCFS."""

DEFAULT_ORDERS: Mapping[str, Order] = MappingProxyType({"slo": SLO})
"""The orders by name that an engine has unless it is given others."""
