"""The fleet without input or output: events in, commands out. Asyncio and ZeroMQ are a thin shell around it.

    door    Open, Edit, Close     ┌───────┐   Deliver, Refuse        → door
    workers FromWorker, Lost   →  │ Fleet │   Send                   → workers
    clock   Tick                  └───────┘   Start, Kill            → processes

It remembers of each request what its client has been given. When a worker dies, its requests go to another
(or to the same one, started anew) as a next attempt that carries those tokens, and goes on behind them.
Of an open prompt it keeps the latest version, so an edit that a client was told of is never lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from streamserve.control.events import (
    Close,
    Command,
    Deliver,
    Edit,
    FleetEvent,
    Heard,
    Kill,
    Lost,
    Open,
    Refuse,
    Send,
    Start,
    Tick,
)
from streamserve.control.placement import Placement
from streamserve.control.rate import Rate
from streamserve.control.requests import GapError, OpenRequest
from streamserve.control.tickets import OpenTicket, TicketBook
from streamserve.control.workers import Topology, WorkerState
from streamserve.policy.routing import FlowGuard, Router
from streamserve.protocol import messages
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    Cancel,
    Event,
    Events,
    Failed,
    Pushed,
    Ready,
    Report,
    Reserved,
    Token,
    TransferNews,
    Transfers,
    Withdrawn,
)
from streamserve.protocol.tickets import Join, Push, Release, kv_fingerprint

KILL_AFTER = 4
"""A worker that has been silent this many times as long as counts as stuck is killed."""

RETRY_AFTER = (1.0, 60.0)
"""The shortest and the longest time, in seconds, after which a refused client is told to come again."""


@dataclass(frozen=True)
class FleetConfig:
    """`max_requests`: how many may be open at once, running and waiting. `max_waiting_tokens` bounds the
    prompts of those that wait; one request may always wait. A worker that says nothing for `stuck_after`
    seconds counts as stuck. After `max_restarts` losses in `restart_window` seconds it stays down; a request
    that was there for `max_attempts` losses is not tried again."""

    topology: Topology = field(default_factory=Topology)
    router: Router = field(default_factory=FlowGuard)
    max_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    stuck_after: float = 30.0
    max_restarts: int = 3
    restart_window: float = 300.0
    max_attempts: int = 3


class Fleet:
    """All the workers and all the open requests of one server."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.workers = {name: WorkerState() for name in config.topology.names}
        self.requests: dict[str, OpenRequest] = {}
        self.tickets = TicketBook()
        self.placement = Placement(config.topology, config.router)
        self._attempts = count()
        self._finished = Rate()
        self._begun_tokens = Rate()

    def start(self, now: float) -> list[Command]:
        """The commands that bring up the workers."""
        for worker in self.workers.values():
            worker.heard_at = now
        return [Start(name, worker.incarnation) for name, worker in self.workers.items()]

    def handle(self, event: FleetEvent, now: float) -> list[Command]:
        """Take one event; returns what is to be done about it, in order."""
        match event:
            case Open():
                return list(self._open(event, now))
            case Edit():
                return list(self._edit(event, now))
            case Close():
                return list(self._close(event, now))
            case Heard():
                return list(self._heard(event, now))
            case Lost():
                return list(self._lost(event, now))
            case Tick():
                return list(self._tick(now))

    def health(self) -> tuple[bool, str]:
        """Whether requests are being served, and if not, why."""
        well = {name: worker for name, worker in self.workers.items() if worker.ready and not worker.stuck}
        if self.config.topology.complete(well):
            return True, "ready"
        for name, worker in self.workers.items():
            if worker.failure:
                return False, f"worker {name} is down: {worker.failure.error}"
            if worker.ready is None:
                return False, f"worker {name} is loading its model"
            if worker.stuck:
                return False, f"worker {name} has said nothing for {self.config.stuck_after:g} seconds"
        return True, "ready"

    def edit_refusal(self, event: Edit) -> RequestError | None:
        """Why an edit cannot be taken; `handle` ignores it then, and nothing changes."""
        request = self.requests.get(event.request)
        if request is None:
            return RequestError(f"there is no request {event.request}", status=404)
        opened = request.opened
        if not opened.open:
            return RequestError(f"the prompt of {event.request} is finished", status=409)
        if event.version <= opened.version:
            message = f"version {event.version} is not newer than {opened.version}, the current one"
            return RequestError(message, status=409)
        if not 0 <= event.keep <= len(opened.prompt):
            message = f"keep is {event.keep}, but the prompt has {len(opened.prompt)} tokens"
            return RequestError(message, status=400)
        if not 0 <= event.tail <= event.keep + len(event.tokens):
            return RequestError(f"tail is {event.tail}, more than the prompt's tokens", status=400)
        if event.params is not None and event.params.n != opened.params.n:
            return RequestError("the number of choices (n) cannot change", status=400)
        return None

    def _open(self, event: Open, now: float) -> Iterator[Command]:
        if event.request in self.requests:
            yield Refuse(event.request, RequestError(f"request id {event.request} is in use", status=409))
            return
        full = self._full(event, now)
        if full:
            yield Refuse(event.request, full)
            return
        choices = range(event.params.n)
        request = OpenRequest(event, now, next(self._attempts))
        request.outputs = {choice: [] for choice in choices}
        request.resumed = {choice: [] for choice in choices}
        request.open_choices = set(choices)
        self.requests[event.request] = request
        yield from self._place(request, now)

    def _edit(self, event: Edit, now: float) -> Iterator[Command]:
        """The latest prompt is kept for a next attempt. An answer to an earlier one is withdrawn at once."""
        if self.edit_refusal(event):
            return
        request = self.requests[event.request]
        before = request.opened
        prompt = before.prompt[: event.keep] + event.tokens
        request.opened = after = replace(
            before,
            prompt=prompt,
            params=event.params or before.params,
            open=not event.finish,
            tail=event.tail,
            version=event.version,
        )
        if request.worker is not None:
            message = messages.Edit(
                event.request, request.attempt, event.version, event.keep, event.tokens, event.finish,
                event.params, event.tail, now,
            )  # fmt: skip
            yield Send(request.worker, message)
            yield from self._reserve(request)
        if before.answer_early and (after.prompt, after.params) != (before.prompt, before.params):
            request.awaits = event.version if request.worker is not None else None
            if any(request.outputs.values()):
                request.outputs = {choice: [] for choice in request.outputs}
                request.began.clear()
                withdrawn = Withdrawn(event.request, request.attempt, event.version)
                yield Deliver(event.request, [withdrawn], last=False)

    def _full(self, event: Open, now: float) -> RequestError | None:
        """Why a request must come later, if it must, and when: once those that wait now have had their turn,
        at the rate at which requests end or prompts begin."""
        limit = self.config.max_requests
        if len(self.requests) >= limit:
            waiting = sum(not request.admitted for request in self.requests.values())
            message = f"{len(self.requests)} requests are open, which is the limit (max_requests)"
            return _later(message, self._finished.seconds_for(now, waiting + 1))
        limit = self.config.max_waiting_tokens
        tokens = sum(len(r.opened.prompt) for r in self.requests.values() if not r.admitted)
        if tokens and tokens + len(event.prompt) > limit:
            message = (
                f"the prompt has {len(event.prompt)} tokens, and {tokens} tokens are waiting already; "
                f"the limit is {limit} (max_waiting_tokens)"
            )
            return _later(message, self._begun_tokens.seconds_for(now, tokens))
        return None

    def _place(self, request: OpenRequest, now: float) -> Iterator[Command]:
        """Give a request to where the router says; with no place for it now it waits for one."""
        if not self.config.topology.complete(self._alive()):
            yield self._refuse(request, RequestError(self.health()[1], status=503, retry_after=5.0))
            return
        place = self.placement.choose(request, self.workers, now)
        if place is None:
            return
        front, decode = place
        # What ends with its first token, or is answered while it changes, is not worth a move.
        params, early = request.opened.params, request.opened.answer_early
        whole = decode is None or params.max_tokens in (0, 1) or early
        request.worker, request.decode = front, None if whole else decode
        request.handing = set() if whole else set(request.open_choices)
        request.awaits = None
        self.workers[front].prefilling[request.opened.request] = len(request.opened.prompt)
        yield Send(front, request.submit("both" if whole else "prefill"))

    def _close(self, event: Close, now: float) -> Iterator[Command]:
        request = self.requests.get(event.request)
        if request is None:
            return
        if event.choice is None:
            request.open_choices.clear()
        else:
            request.open_choices.discard(event.choice)
            request.handing.discard(event.choice)
        for worker in sorted(request.workers):
            yield Send(worker, Cancel(event.request, event.choice))
        if not request.open_choices:
            self._end(request, now)

    def _heard(self, event: Heard, now: float) -> Iterator[Command]:
        worker = self.workers[event.worker]
        if event.incarnation != worker.incarnation or worker.failure:
            return
        worker.heard_at, worker.stuck = now, False
        match event.message:
            case Ready():
                worker.ready = event.message
                worker.failure = self._misfit(event.worker, event.message)
                if worker.failure:
                    worker.ready = None
                    yield from self._fail_all(now)
                    return
                for request in list(self.requests.values()):
                    if request.worker is None:
                        yield from self._place(request, now)
            case Failed():
                worker.failure = event.message
                yield from self._fail_all(now)
            case Report():
                worker.report = event.message
            case Events():
                yield from self._deliver(event.message.events, now)
            case Transfers():
                for news in event.message.news:
                    yield from self._transfer(event.worker, news, now)

    def _misfit(self, name: str, ready: Ready) -> Failed | None:
        """Why a worker cannot exchange KV with the others, if it cannot."""
        for other, worker in self.workers.items():
            if other == name or worker.ready is None:
                continue
            own, theirs = _kv_format(ready), _kv_format(worker.ready)
            if own != theirs:
                return Failed(f"its KV is of {own}, that of worker {other} of {theirs}", 1)
        return None

    def _deliver(self, events: list[Event], now: float) -> Iterator[Command]:
        """Pass on what is new of each request, in one piece each."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        for name, news in by_request.items():
            request = self.requests.get(name)
            if request is None:
                continue
            try:
                fresh = [taken for event in news if (taken := request.accept(event, now)) is not None]
            except GapError as gap:
                yield from self._cancel(request)
                yield self._refuse(request, RequestError(str(gap), status=500))
                continue
            yield from self._noticed(request, news, fresh, now)
            last = not request.open_choices
            if last:
                if request.decode and name not in self.workers[request.decode].decoding:
                    yield Send(request.decode, Cancel(name))  # it ended before its KV had to move
                self._end(request, now)
            if fresh or last:
                yield Deliver(name, fresh, last)

    def _noticed(
        self, request: OpenRequest, news: list[Event], fresh: list[Event], now: float
    ) -> Iterator[Command]:
        """What the fleet's own books take from a request's news."""
        if any(isinstance(event, Admitted) for event in fresh):
            self._begun_tokens.add(now, len(request.opened.prompt))
        if request.decode is None and any(isinstance(event, Token) for event in fresh):
            self._decodes(request)
        if any(isinstance(event, Admitted) and event.attempt == request.attempt for event in news):
            request.planned = True
            yield from self._reserve(request)

    def _reserve(self, request: OpenRequest) -> Iterator[Command]:
        """Once a prompt is complete and its first chunk planned, its decode worker is to hold blocks for
        it."""
        due = request.planned and not request.opened.open and bool(request.open_choices)
        if due and request.decode and not request.reserving:
            request.reserving = True
            yield Send(request.decode, request.submit("decode"))

    def _transfer(self, worker: str, news: TransferNews, now: float) -> Iterator[Command]:
        match news:
            case Reserved():
                yield from self._reserved(worker, news)
            case Pushed():
                yield from self._pushed(worker, news, now)

    def _reserved(self, owner: str, news: Reserved) -> Iterator[Command]:
        """Blocks are held for a ticket: its writer may use it, if anybody still wants it."""
        request = self.requests.get(news.request)
        current = request is not None and request.attempt == news.attempt and request.decode == owner
        if request is None or not current or request.worker is None:
            yield Send(owner, Release(news.ticket.id))
            return
        self.tickets.add(OpenTicket(news.ticket, request.worker, owner))
        yield Send(request.worker, Push(news.ticket))

    def _pushed(self, worker: str, news: Pushed, now: float) -> Iterator[Command]:
        """Nobody writes to a ticket any more: its choices decode there, or the request starts over if their
        KV is missing."""
        entry = self.tickets.close(news.ticket)
        request = self.requests.get(news.request)
        current = request is not None and request.attempt == news.attempt
        going = request.handing & set(entry.ticket.choices) if request and current and entry else set()
        if entry and going and not news.error and request:
            request.handing -= going
            outputs = {choice: list(request.outputs[choice]) for choice in sorted(going)}
            began = {choice: request.began[choice] for choice in sorted(going)}
            yield Send(entry.owner, Join(news.request, news.attempt, news.ticket, outputs, began))
            if not request.handing:
                self._decodes(request)
            return
        if entry:
            yield Send(entry.owner, Release(news.ticket))
        if request and current and (going or worker == request.decode):
            yield from self._cancel(request)
            yield from self._retry(request, f"its KV could not be moved: {news.error}", now)

    def _decodes(self, request: OpenRequest) -> None:
        """A request's prompt is computed, and its KV is where it is decoded."""
        name = request.opened.request
        if request.worker:
            self.workers[request.worker].prefilling.pop(name, None)
        place = request.decode or request.worker
        if place:
            self.workers[place].decoding.add(name)

    def _lost(self, event: Lost, now: float) -> Iterator[Command]:
        worker = self.workers[event.worker]
        if event.incarnation != worker.incarnation or worker.failure:
            return
        never_ready = worker.incarnation == 1 and worker.ready is None
        self.placement.view.forget(event.worker)
        worker.ready = worker.report = None
        worker.losses = [t for t in worker.losses if now - t < self.config.restart_window] + [now]
        if never_ready or len(worker.losses) > self.config.max_restarts:
            worker.failure = Failed(event.reason, 1)
        else:
            worker.incarnation += 1
            worker.heard_at = now
            yield Start(event.worker, worker.incarnation)
        for entry in self.tickets.lose(event.worker):
            yield Send(entry.owner, Release(entry.ticket.id))
        for request in list(self.requests.values()):
            if request.depends_on(event.worker):
                yield from self._cancel(request, gone=event.worker)
                yield from self._retry(request, f"the worker died: {event.reason}", now)
        yield from self._fail_all(now)

    def _retry(self, request: OpenRequest, reason: str, now: float) -> Iterator[Command]:
        """Another attempt, behind what the client has."""
        self._leave(request)
        request.losses += 1
        request.next_attempt(next(self._attempts))
        if request.losses >= self.config.max_attempts:
            message = f"this request was lost {request.losses} times: {reason}"
            yield self._refuse(request, RequestError(message, status=500))
        else:
            yield from self._place(request, now)

    def _cancel(self, request: OpenRequest, gone: str = "") -> Iterator[Command]:
        """Let all workers but the one that is gone forget a request."""
        for worker in sorted(request.workers - {gone}):
            yield Send(worker, Cancel(request.opened.request))

    def _leave(self, request: OpenRequest) -> None:
        """A request is at no worker any more."""
        for name in request.workers:
            self.workers[name].prefilling.pop(request.opened.request, None)
            self.workers[name].decoding.discard(request.opened.request)

    def _end(self, request: OpenRequest, now: float) -> None:
        self._finished.add(now)
        self._leave(request)
        del self.requests[request.opened.request]

    def _alive(self) -> set[str]:
        """The workers that serve, or will when they have started."""
        return {name for name, worker in self.workers.items() if not worker.failure}

    def _fail_all(self, now: float) -> Iterator[Command]:
        """With no place left, nobody waits in vain."""
        if not self.config.topology.complete(self._alive()):
            for request in list(self.requests.values()):
                yield from self._place(request, now)

    def _refuse(self, request: OpenRequest, error: RequestError) -> Command:
        self._leave(request)
        del self.requests[request.opened.request]
        return Refuse(request.opened.request, error)

    def _tick(self, now: float) -> Iterator[Command]:
        for name, worker in self.workers.items():
            silence = now - worker.heard_at
            worker.stuck = worker.ready is not None and silence > self.config.stuck_after
            if worker.stuck and silence > KILL_AFTER * self.config.stuck_after:
                worker.heard_at = now
                yield Kill(name)


def _kv_format(ready: Ready) -> str:
    return kv_fingerprint(ready.model.fingerprint, ready.block_size)


def _later(message: str, seconds: float | None) -> RequestError:
    """A refusal of what may be served in `seconds`, if that is known."""
    low, high = RETRY_AFTER
    retry_after = low if seconds is None else min(max(seconds, low), high)
    return RequestError(message, status=429, retry_after=retry_after)
