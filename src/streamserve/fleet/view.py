"""The fleet's state for GET /v1/router: its workers now, and the routing of recent requests."""

from collections.abc import Sequence

import msgspec

from streamserve.fleet.fleet import Fleet
from streamserve.fleet.launcher import MachineState
from streamserve.fleet.placement import RoutingRecord


class WorkerView(msgspec.Struct, frozen=True):
    """A worker. `starts` counts the starts of its process; `silence` is the number of seconds since its
    last message. A `draining` worker gets no new requests. `host` names its machine; empty if it runs on
    none now."""

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
    host: str = ""


class MachineView(msgspec.Struct, frozen=True):
    """A machine with `slots` for `workers` (null: not limited). It joined `joined_seconds` ago and was last
    heard `silence` seconds ago."""

    name: str
    slots: int | None
    workers: list[str]
    joined_seconds: float
    silence: float


class CandidateView(msgspec.Struct, frozen=True):
    """A route candidate (its worker, or its prefill and decode worker), the prompt tokens cached there, and
    its score (null: skipped)."""

    workers: str
    cached_tokens: int
    score: float | None


class DecisionView(msgspec.Struct, frozen=True):
    """The workers to which a request went `seconds_ago`, and the reason: the router's score, or another
    reason."""

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
    machines: list[MachineView] = []


def router_view(fleet: Fleet, router: str, machines: Sequence[MachineState], now: float) -> RouterView:
    """Return the view of a fleet on these machines. `router` is the router's name."""
    hosts = {worker: machine.name for machine in machines for worker in machine.workers}
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
                silence=round(max(load.silence, 0.0), 3) if worker.heard_at else 0.0,
                host=hosts.get(name, ""),
            )
        )
    decisions = [_decision(record, now) for record in reversed(fleet.placement.recent)]
    present = [_machine(machine, now) for machine in machines]
    return RouterView(router, workers, len(fleet.transfers.reservations), decisions, present)


def _machine(machine: MachineState, now: float) -> MachineView:
    return MachineView(
        name=machine.name,
        slots=machine.slots,
        workers=list(machine.workers),
        joined_seconds=round(now - machine.joined_at, 3),
        silence=round(max(now - machine.heard_at, 0.0), 3),
    )


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
