"""The order in which an engine serves its sequences: the interface `Order`, and the default, `SLO`.

In every order a lower `priority` value goes first. `rank` decides which sequences keep sequence slots and
memory: the lowest-ranked lose them to the highest-ranked, so ranks must not change back and forth.
`service_order` decides which sequences get the query tokens of one step. baselines/orders.py has the orders
to compare with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import LatencyRequirement

MAX_WAIT = 10.0
"""Maximum wait in seconds. A request without a target for its first token, or with a missed one, ranks as if
its target were this many seconds: after urgent requests, but it does not starve."""

WAIT_PER_WORK = 10.0
"""Seconds by which a prompt stream ranks later, for each second of computing that it still needs. Requests
with little left do not wait for requests with much, and requests with much left still age."""

BatchCap = Callable[[Sequence[LatencyRequirement], Callable[[int], float], int], int]
"""Takes the requirements of the decoding requests, the seconds of a step by query tokens, and the maximum
query tokens of a step. Returns the maximum query tokens of this step."""


def decoding_first(views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    """Return the `ranked` requests, decoding sequences before prompts."""
    return sorted(ranked, key=lambda i: not views[i].decoding)


@dataclass(frozen=True)
class Order:
    """An order of service.

    * `key(view, now)`: sort key among requests of one priority; the lowest ranks first.
    * `complete_first`: complete prompts rank before prompt streams. Prompt streams are deferred until the
      complete prompts are served, because no client waits for their output yet. Among themselves they are
      served by edit stability.
    * `serve(views, ranked, now)`: returns the `ranked` requests in service order.
    * `exclusive`: a step with a prompt in it decodes nothing.
    * `cap`: limits the query tokens of a step.
    * `by_targets`: latency targets decide the chunks and the admission of prompts (scheduling/prefill.py,
      slo_admission.py). Otherwise a chunk is as long as the budget permits.
    """

    key: Callable[[RequestView, float], float]
    complete_first: bool = False
    serve: Callable[[Sequence[RequestView], Sequence[int], float], Sequence[int]] = decoding_first
    exclusive: bool = False
    cap: BatchCap | None = None
    by_targets: bool = False


def rank(order: Order, views: Sequence[RequestView], now: float) -> list[int]:
    """Return the requests' indices, highest rank first; requests with equal keys keep the given order. Idle
    prompt streams come last in every order, whatever their priority: memory is for sequences with something
    to compute."""
    key, complete_first = order.key, order.complete_first

    keys = [
        (view.idle, view.priority, complete_first and not view.complete, key(view, now)) for view in views
    ]
    return sorted(range(len(views)), key=keys.__getitem__)


def service_order(order: Order, views: Sequence[RequestView], ranked: Sequence[int], now: float) -> list[int]:
    """Return the `ranked` requests in the order in which they get a step's query tokens. `ranked` may contain
    only some of `views`."""
    served = order.serve(views, ranked, now)
    return _edit_stable_first(views, served) if order.complete_first else list(served)


def _edit_stable_first(views: Sequence[RequestView], ranked: Sequence[int]) -> list[int]:
    """Return `ranked` with the prompt streams of each priority reordered, the most edit-stable first.
    Complete prompts keep their positions."""
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
    """Return the time at which the request is due, on the engine's clock: the sort key of the order `SLO`.

    * With a `tpot` target: when its prompt was complete.
    * Otherwise, with a deadline of the first token that can still be met: the deadline.
    * Otherwise: MAX_WAIT after its prompt was complete.

    Without a `tpot` target, a request whose prompt is or was a stream is due later in proportion to its
    remaining work, unless its deadline is too near for that: by deadlines alone, requests with little work
    left would wait for requests with much.
    """
    complete_since, work = view.complete_since, WAIT_PER_WORK * view.prefill_seconds
    if view.requirement.tpot is not None:
        return complete_since
    deadline = view.deadline
    if deadline is not None and deadline > now:
        return deadline + work if now + work < deadline else deadline
    return complete_since + MAX_WAIT + work


SLO = Order(due, complete_first=True, by_targets=True)
"""The default order: by latency target, then by arrival. One step mixes decoding and prompt chunks. Complete
prompts come before prompt streams, as in Stream2LLM's FCFS."""

DEFAULT_ORDERS: Mapping[str, Order] = MappingProxyType({"slo": SLO})
"""The orders by name that an engine has unless it is given others."""
