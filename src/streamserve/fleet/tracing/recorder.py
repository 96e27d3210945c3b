"""Records the spans of each request over all processes, from the fleet's events and commands.

    FleetEvent, Command ──▶ Recorder ──▶ Span ──▶ sinks: a timeline file, OpenTelemetry
    Work of workers     ──▶

A request's spans: queued (until its first chunk is scheduled), prompt (until output 0), transfer (of a
reservation's KV, from the time its blocks were reserved), decode, and one for each worker that had it, with
the lifecycle events there.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamserve.fleet.events import (
    ClientEdit,
    Close,
    Command,
    Deliver,
    Drain,
    FleetEvent,
    Open,
    Refuse,
    WorkerMessage,
)
from streamserve.protocol.messages import (
    Admitted,
    Deferred,
    Event,
    Events,
    Reserved,
    Token,
    Transfers,
    TransferUpdate,
    Work,
)

logger = logging.getLogger(__name__)

FRONT = "front"
"""Name of the process in which the fleet runs."""


@dataclass(frozen=True)
class TraceSpan:
    """An interval from `start` to `end`, in seconds of the clock that all processes share. `events` are its
    lifecycle events with their times. `tokens` is the number of a step's query tokens. `late`: the span came
    after the end of its request."""

    name: str
    process: str
    request: str
    start: float
    end: float
    events: tuple[tuple[str, float], ...] = ()
    tokens: int = 0
    late: bool = False


class Sink(Protocol):
    """Receives each span when it has ended. The span named `request` is the last of its request."""

    def add(self, span: TraceSpan) -> None:
        """Add a span."""

    def close(self) -> None:
        """Close: no more spans follow."""


@dataclass
class _RequestTrace:
    """An open request: when its phases began, and the events that workers reported for it."""

    submitted: float
    first_chunk: float | None = None
    output: float | None = None
    reservations: dict[str, tuple[str, float]] = field(default_factory=dict)
    events: dict[str, list[tuple[str, float]]] = field(default_factory=dict)


class Recorder:
    """Follows the open requests of one fleet and passes their spans to all sinks. A sink that fails is not
    used any more; requests are not affected."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.failures = 0
        self._traces: dict[str, _RequestTrace] = {}

    @property
    def open(self) -> int:
        """The number of requests that are being followed."""
        return len(self._traces)

    def observe(self, event: FleetEvent, commands: Iterable[Command], now: float) -> None:
        """Record an event of the fleet and the commands it caused."""
        match event:
            case Open():
                self._traces.setdefault(event.request, _RequestTrace(now))
            case ClientEdit():
                self._instant("edit", event.request, now)
            case Drain():
                self._instant("draining" if event.draining else "resumed", "", now, event.worker)
            case WorkerMessage():
                self._heard(event, now)
            case Close(choice=None):
                self._end(event.request, now)
        for command in commands:
            if isinstance(command, Refuse) or (isinstance(command, Deliver) and command.last):
                self._end(command.request, now)

    def record_work(self, worker: str, work: Sequence[Work]) -> None:
        for item in work:
            if item.name == "step":
                self._add(
                    TraceSpan("step", worker, "", item.at, item.at + item.seconds, tokens=item.query_tokens)
                )
            elif trace := self._traces.get(item.request):
                trace.events.setdefault(worker, []).append((item.name, item.at))
            else:
                self._instant(item.name, item.request, item.at, worker)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._failed(sink, error)

    def _heard(self, event: WorkerMessage, now: float) -> None:
        if isinstance(event.message, Events):
            for reported in event.message.events:
                self._record_event(reported, event.worker, now)
        if isinstance(event.message, Transfers):
            for update in event.message.updates:
                self._record_transfer(update, event.worker, now)

    def _record_event(self, event: Event, worker: str, now: float) -> None:
        trace = self._traces.get(event.request)
        if trace is None:
            return
        if isinstance(event, Admitted) and trace.first_chunk is None:
            trace.first_chunk = now
            self._add(TraceSpan("queued", FRONT, event.request, trace.submitted, now))
        if isinstance(event, Token) and trace.output is None:
            trace.output = now
            self._add(TraceSpan("prompt", worker, event.request, trace.first_chunk or trace.submitted, now))

    def _record_transfer(self, update: TransferUpdate, worker: str, now: float) -> None:
        trace = self._traces.get(update.request)
        if trace is None or isinstance(update, Deferred):
            return
        if isinstance(update, Reserved):
            trace.reservations[update.reservation.id] = worker, now
        elif update.reservation_id in trace.reservations:
            _, since = trace.reservations.pop(update.reservation_id)
            self._add(
                TraceSpan(
                    "failed transfer" if update.error else "transfer", worker, update.request, since, now
                )
            )

    def _end(self, request: str, now: float) -> None:
        trace = self._traces.pop(request, None)
        if trace is None:
            return
        for worker, events in trace.events.items():
            self._add(TraceSpan(f"at {worker}", worker, request, events[0][1], events[-1][1], tuple(events)))
        if trace.output is not None:
            self._add(TraceSpan("decode", FRONT, request, trace.output, now))
        self._add(TraceSpan("request", FRONT, request, trace.submitted, now))

    def _instant(self, name: str, request: str, at: float, process: str = FRONT) -> None:
        trace = self._traces.get(request)
        if trace is not None:
            trace.events.setdefault(process, []).append((name, at))
        else:
            self._add(TraceSpan(name, process, request, at, at, late=bool(request)))

    def _add(self, span: TraceSpan) -> None:
        for sink in list(self._sinks):
            try:
                sink.add(span)
            except Exception as error:
                self._sinks.remove(sink)
                self._failed(sink, error)

    def _failed(self, sink: Sink, error: Exception) -> None:
        """Count and log the failure of a sink, after its removal."""
        self.failures += 1
        logger.error("%s failed and is not used any more: %s", type(sink).__name__, error)
