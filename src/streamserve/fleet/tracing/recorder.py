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

from streamserve.fleet.events import Close, Command, Deliver, Edit, FleetEvent, Heard, Open, Refuse, Rest
from streamserve.protocol.messages import Admitted, Event, Events, Pushed, Reserved, Token, Transfers, Work

logger = logging.getLogger(__name__)

FRONT = "front"
"""The process that the fleet is in."""


@dataclass(frozen=True)
class Span:
    """An interval from `start` to `end`, in seconds of the clock that all processes share. `moments` are its
    lifecycle events with their times; `rows` are a step's query tokens. `late`: it came after its request had
    ended."""

    name: str
    process: str
    request: str
    start: float
    end: float
    moments: tuple[tuple[str, float], ...] = ()
    rows: int = 0
    late: bool = False


class Sink(Protocol):
    """Receives spans, each when it has ended. A request's own span (`request`) is its last."""

    def add(self, span: Span) -> None:
        """Add a span."""
        ...

    def close(self) -> None:
        """Close: no more spans follow."""
        ...


@dataclass
class _Life:
    """An open request: when its phases began, and the events that workers reported for it."""

    submitted: float
    first_chunk: float | None = None
    output: float | None = None
    tickets: dict[str, tuple[str, float]] = field(default_factory=dict)
    moments: dict[str, list[tuple[str, float]]] = field(default_factory=dict)


class Recorder:
    """Follows the open requests of one fleet and gives their spans to all sinks. A sink that fails is not
    used any more; requests are not affected."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.failures = 0
        self._lives: dict[str, _Life] = {}

    @property
    def open(self) -> int:
        """The number of requests that are being followed."""
        return len(self._lives)

    def observe(self, event: FleetEvent, commands: Iterable[Command], now: float) -> None:
        """Record an event of the fleet and the commands it caused."""
        match event:
            case Open():
                self._lives.setdefault(event.request, _Life(now))
            case Edit():
                self._instant("edit", event.request, now)
            case Rest():
                self._instant("draining" if event.draining else "resumed", "", now, event.worker)
            case Heard():
                self._heard(event, now)
            case Close(choice=None):
                self._end(event.request, now)
        for command in commands:
            if isinstance(command, Refuse) or (isinstance(command, Deliver) and command.last):
                self._end(command.request, now)

    def worked(self, worker: str, work: Sequence[Work]) -> None:
        """Record what a worker did."""
        for one in work:
            if one.name == "step":
                self._add(Span("step", worker, "", one.at, one.at + one.seconds, rows=one.rows))
            elif life := self._lives.get(one.request):
                life.moments.setdefault(worker, []).append((one.name, one.at))
            else:
                self._instant(one.name, one.request, one.at, worker)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._failed(sink, error)

    def _heard(self, event: Heard, now: float) -> None:
        if isinstance(event.message, Events):
            for told in event.message.events:
                self._told(told, event.worker, now)
        if isinstance(event.message, Transfers):
            for news in event.message.news:
                self._moved(news, event.worker, now)

    def _told(self, event: Event, worker: str, now: float) -> None:
        life = self._lives.get(event.request)
        if life is None:
            return
        if isinstance(event, Admitted) and life.first_chunk is None:
            life.first_chunk = now
            self._add(Span("queued", FRONT, event.request, life.submitted, now))
        if isinstance(event, Token) and life.output is None:
            life.output = now
            self._add(Span("prompt", worker, event.request, life.first_chunk or life.submitted, now))

    def _moved(self, news: Reserved | Pushed, worker: str, now: float) -> None:
        life = self._lives.get(news.request)
        if life is None:
            return
        if isinstance(news, Reserved):
            life.tickets[news.ticket.id] = worker, now
        elif news.ticket in life.tickets:
            _, since = life.tickets.pop(news.ticket)
            self._add(Span("failed transfer" if news.error else "transfer", worker, news.request, since, now))

    def _end(self, request: str, now: float) -> None:
        life = self._lives.pop(request, None)
        if life is None:
            return
        for worker, moments in life.moments.items():
            self._add(Span(f"at {worker}", worker, request, moments[0][1], moments[-1][1], tuple(moments)))
        if life.output is not None:
            self._add(Span("decode", FRONT, request, life.output, now))
        self._add(Span("request", FRONT, request, life.submitted, now))

    def _instant(self, name: str, request: str, at: float, process: str = FRONT) -> None:
        life = self._lives.get(request)
        if life is not None:
            life.moments.setdefault(process, []).append((name, at))
        else:
            self._add(Span(name, process, request, at, at, late=bool(request)))

    def _add(self, span: Span) -> None:
        for sink in list(self._sinks):
            try:
                sink.add(span)
            except Exception as error:
                self._sinks.remove(sink)
                self._failed(sink, error)

    def _failed(self, sink: Sink, error: Exception) -> None:
        """Count and log the failure of a sink, which is not used any more."""
        self.failures += 1
        logger.error("%s failed and takes nothing more: %s", type(sink).__name__, error)
