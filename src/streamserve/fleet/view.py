"""The fleet's state for GET /v1/router: its workers now, and the routing of recent requests."""

import msgspec

from streamserve.fleet.fleet import Fleet
from streamserve.fleet.placement import RoutingRecord


class WorkerView(msgspec.Struct, frozen=True):
    """A worker. `starts` counts the starts of its process; `silence` is in seconds. A `draining` one gets no
    new requests."""

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


class CandidateView(msgspec.Struct, frozen=True):
    """A route candidate (its worker, or its prefill and decode worker), the prompt tokens cached there, and
    its score (null: skipped)."""

    workers: str
    cached_tokens: int
    score: float | None


class DecisionView(msgspec.Struct, frozen=True):
    """Where a request went `seconds_ago`, and why: by the score, or as more of it is computed there."""

    request: str
    seconds_ago: float
    prompt_tokens: int
    chosen: str
    reason: str
    candidates: list[CandidateView]


class RouterView(msgspec.Struct, frozen=True):
    """A snapshot of the fleet; the latest decision comes first."""

    router: str
    workers: list[WorkerView]
    open_reservations: int
    decisions: list[DecisionView]


def router_view(fleet: Fleet, router: str, now: float) -> RouterView:
    """Return the view of a fleet whose router is named `router`."""
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
    decisions = [_decision(record, now) for record in reversed(fleet.placement.recent)]
    return RouterView(router, workers, len(fleet.transfers.reservations), decisions)


def _decision(record: RoutingRecord, now: float) -> DecisionView:
    candidates = [
        CandidateView(workers, cached, score)
        for workers, cached, score in zip(
            record.candidates, record.cached, record.decision.scores, strict=True
        )
    ]
    return DecisionView(
        request=record.request,
        seconds_ago=round(now - record.time, 3),
        prompt_tokens=record.prompt_tokens,
        chosen=record.taken or record.candidates[record.decision.chosen],
        reason=record.reason or record.decision.reason,
        candidates=candidates,
    )
