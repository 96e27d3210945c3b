"""What the fleet shows of itself: its workers now, and why recent requests went where they did."""

import msgspec

from streamserve.fleet.fleet import Fleet
from streamserve.fleet.placement import Explained


class WorkerView(msgspec.Struct, frozen=True):
    """A worker. `starts` counts the times its process was started; `silence` is in seconds. A `draining` one
    gets no new requests."""

    name: str
    ready: bool
    draining: bool
    starts: int
    queued: int
    queued_tokens: int
    decoding: int
    blocks_live: int
    blocks_total: int
    silence: float


class PlaceView(msgspec.Struct, frozen=True):
    """A place that was looked at: tokens of the prompt cached there, and its score (null: passed over)."""

    place: str
    cached_tokens: int
    score: float | None


class DecisionView(msgspec.Struct, frozen=True):
    """Where a request went `seconds_ago`, and why."""

    request: str
    seconds_ago: float
    prompt_tokens: int
    chosen: str
    reason: str
    places: list[PlaceView]


class RouterView(msgspec.Struct, frozen=True):
    """The fleet at one moment; the latest decision comes first."""

    router: str
    workers: list[WorkerView]
    open_tickets: int
    decisions: list[DecisionView]


def router_view(fleet: Fleet, router: str, now: float) -> RouterView:
    """The view of a fleet whose router has this name."""
    workers = []
    for name, worker in fleet.workers.items():
        load = worker.load(name, now)
        workers.append(
            WorkerView(
                name=name,
                ready=worker.ready is not None and not worker.stuck,
                draining=worker.draining,
                starts=worker.incarnation,
                queued=load.queued,
                queued_tokens=load.queued_tokens,
                decoding=load.decoding,
                blocks_live=load.blocks_live,
                blocks_total=worker.blocks,
                silence=round(max(load.silence, 0.0), 3),
            )
        )
    decisions = [_decision(one, now) for one in reversed(fleet.placement.recent)]
    return RouterView(router, workers, len(fleet.tickets), decisions)


def _decision(one: Explained, now: float) -> DecisionView:
    places = [
        PlaceView(place, cached, score)
        for place, cached, score in zip(one.places, one.cached, one.decision.scores, strict=True)
    ]
    return DecisionView(
        request=one.request,
        seconds_ago=round(now - one.time, 3),
        prompt_tokens=one.prompt_tokens,
        chosen=one.places[one.decision.chosen],
        reason=one.decision.reason,
        places=places,
    )
