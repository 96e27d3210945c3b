"""The fleet's state machine, without input or output: events in, commands out. The asyncio and ZeroMQ runtime
around it is in `runtime`.

    API server  Open, Edit, Close, Drain      ┌───────┐   Deliver, Refuse   → API server
    workers     WorkerMessage, WorkerLost  →  │ Fleet │   Send              → workers
    clock       Tick                          └───────┘   Start, Kill       → processes

For each request it stores the tokens that were delivered to the client. When a worker dies, its requests go
to another worker (or to the same one after its restart) as a new attempt that carries those tokens and
continues after them. Of a prompt stream it stores the latest version, so an acknowledged edit is never lost.
"""

from collections import ChainMap
from collections.abc import Iterator
from itertools import count

from streamserve.fleet.admission import Admission
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import (
    Close,
    Command,
    Deliver,
    Drain,
    Edit,
    FleetEvent,
    Kill,
    Open,
    Refuse,
    Send,
    Tick,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.isolation import Isolation, conviction
from streamserve.fleet.kv_writeback import WritebackManager
from streamserve.fleet.placement import Placement
from streamserve.fleet.quarantine import Quarantine
from streamserve.fleet.requests import GapError, OpenRequest
from streamserve.fleet.reservations import ReservationBook
from streamserve.fleet.supervisor import WorkerSupervisor
from streamserve.fleet.worker_state import Queued, WorkerState
from streamserve.protocol import messages
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    Cached,
    Cancel,
    Event,
    Events,
    Failed,
    Finished,
    Progress,
    Ready,
    Reserved,
    Token,
    Transfers,
    TransferUpdate,
    Withdrawn,
)
from streamserve.protocol.reports import IncidentReport, Report


class Fleet:
    """All workers and all open requests of one server."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.supervisor = WorkerSupervisor(config.topology, config.stuck_after)
        self.availability = self.supervisor.availability
        self.quarantine = Quarantine(config.topology, config.max_attempts)
        self.requests: dict[str, OpenRequest] = {}
        self.reservations = ReservationBook()
        self.writebacks = WritebackManager(config.topology)
        self.placement = Placement(self.availability, config.router, config.continue_tokens)
        self._admission = Admission(config.max_requests, config.max_waiting_tokens)
        self._isolation = Isolation(
            self.quarantine, self.availability, self.requests, self._withdraw, self._place_waiting
        )
        self._attempts = count()
        self.convicted = 0

    @property
    def workers(self) -> dict[str, WorkerState]:
        """The state of each worker, by name."""
        return self.supervisor.workers

    def start(self, now: float) -> list[Command]:
        """Return the commands that start the workers."""
        return [*self.supervisor.start(now)]

    def handle(self, event: FleetEvent, now: float) -> list[Command]:
        """Process one event; return the resulting commands in order."""
        match event:
            case Open():
                return list(self._open(event, now))
            case Edit():
                return list(self._edit(event, now))
            case Close():
                return list(self._close(event, now))
            case Drain():
                return list(self._drain(event, now))
            case WorkerMessage():
                return list(self._heard(event, now))
            case WorkerLost():
                return list(self._lost(event, now))
            case Tick():
                return list(self._tick(event, now))

    def health(self) -> tuple[bool, str]:
        """Return whether requests are being served, and if not, why."""
        return self.availability.health()

    def incidents(self) -> IncidentReport:
        """Return the incident counters: worker deaths, suspected, quarantined and convicted requests."""
        return IncidentReport(
            deaths=self.supervisor.deaths,
            suspects=self.quarantine.suspected,
            quarantined=len(self.quarantine),
            convicted=self.convicted,
        )

    def abandon(self, name: str, error: RequestError) -> list[Command]:
        """Cancel a request at all its workers and refuse it to its client."""
        request = self.requests.get(name)
        return [] if request is None else [*self._cancel(request), self._refuse(request, error)]

    def open_at(self, worker: str) -> int:
        """Return the number of requests that use a worker or its partner in a stream pair."""
        names = self.config.topology.partners(worker)
        return sum(bool(names & request.workers) for request in self.requests.values())

    def edit_refusal(self, event: Edit) -> RequestError | None:
        """Return the reason to reject an edit, or None. `handle` ignores a rejected edit: nothing changes."""
        request = self.requests.get(event.request)
        if request is None:
            return RequestError(f"there is no request {event.request}", status=404)
        return request.edit_refusal(event)

    def _open(self, event: Open, now: float) -> Iterator[Command]:
        if event.request in self.requests:
            yield Refuse(event.request, RequestError(f"request id {event.request} is in use", status=409))
            return
        refusal = self._admission.refusal(event, self.requests.values(), now)
        if refusal is None and (reason := self.availability.unavailable_reason()):
            refusal = self._unavailable(reason, now)
        if refusal:
            yield Refuse(event.request, refusal)
            return
        choices = range(event.params.n)
        request = OpenRequest(event, now, next(self._attempts))
        request.outputs = {choice: [] for choice in choices}
        request.resumed = {choice: [] for choice in choices}
        request.open_choices = set(choices)
        self.requests[event.request] = request
        yield from self._place(request, now)

    def _edit(self, event: Edit, now: float) -> Iterator[Command]:
        """Store the latest prompt for a next attempt. Output for an earlier version is withdrawn at once."""
        if self.edit_refusal(event):
            return
        request = self.requests[event.request]
        withdrawn = request.edit(event)
        if request.worker is not None:
            params = request.limited(event.params) if event.params else None
            message = messages.Edit(
                event.request, request.attempt, event.version, event.retained, event.tokens, event.finish,
                params, event.tail, now,
            )  # fmt: skip
            yield Send(request.worker, message)
            yield from self._reserve(request)
        if withdrawn:
            notice = Withdrawn(event.request, request.attempt, event.version)
            yield Deliver(event.request, [notice], last=False)

    def _place(self, request: OpenRequest, now: float) -> Iterator[Command]:
        """Route a request to the router's choice; without a free route candidate it stays waiting."""
        if not self.availability.can_serve:
            yield self._refuse(request, self._unavailable(self.health()[1], now))
            return
        name, trial = request.name, self.quarantine.trial
        if self.quarantine.waits(name):
            return
        if trial and name in trial.group.members:
            chosen = self.placement.choose(request, now, only=trial.workers)
        else:
            chosen = self.placement.choose(request, now, without=self.quarantine.reserved(now))
        if chosen is None:
            return
        front, decode, tokens = chosen
        # Do not hand a request to a decode worker if it ends with its first token or is answered while its
        # prompt changes.
        params, early = request.opened.params, request.opened.answer_early
        local = decode is None or params.max_tokens in (0, 1) or early
        request.worker, request.decode = front, None if local else decode
        request.transferring = set() if local else set(request.open_choices)
        request.awaited_version = None
        ttft = request.opened.params.slo.ttft_ms
        deadline = None if ttft is None else request.arrival + ttft / 1000
        self.workers[front].queue(request.opened.request, Queued(tokens, deadline), now)
        self.workers[request.decode or front].incoming.add(request.opened.request)
        yield Send(front, request.submit("both" if local else "prefill"))

    def _close(self, event: Close, now: float) -> Iterator[Command]:
        request = self.requests.get(event.request)
        if request is None:
            return
        if event.choice is None:
            request.open_choices.clear()
        else:
            request.open_choices.discard(event.choice)
            request.transferring.discard(event.choice)
        for worker in sorted(request.workers):
            yield Send(worker, Cancel(event.request, event.choice))
        if not request.open_choices:
            self._end(request, now)

    def _heard(self, event: WorkerMessage, now: float) -> Iterator[Command]:
        worker = self.supervisor.hear(event.worker, event.incarnation, now)
        if worker is None:
            return
        match event.message:
            case Ready():
                if self.supervisor.join(event.worker, event.message, now):
                    yield from self._isolation.advance(now)
                    yield from self._place_waiting(now)
                else:
                    yield Kill(event.worker)
                    yield from self._fail_all(now)
            case Failed():
                self.supervisor.fail(event.worker, event.message)
                yield from self._fail_all(now)
            case Report():
                worker.reported(event.message)
            case Cached():
                self.placement.view.update(event.worker, event.message, worker.blocks)
            case Events():
                yield from self._deliver(event.message.events, now)
            case Transfers():
                for update in event.message.updates:
                    yield from self._transfer(event.worker, update, now)

    def _drain(self, event: Drain, now: float) -> Iterator[Command]:
        """Set whether a worker is draining. Requests that wait for it are placed elsewhere; requests already
        there continue."""
        self.workers[event.worker].draining = event.draining
        yield from self._place_waiting(now)

    def _place_waiting(self, now: float) -> Iterator[Command]:
        for request in list(self.requests.values()):
            if request.worker is None:
                yield from self._place(request, now)

    def _deliver(self, events: list[Event], now: float) -> Iterator[Command]:
        """Deliver the new events of each request, in one batch per request."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        for name, reported in by_request.items():
            request = self.requests.get(name)
            if request is None:
                if any(isinstance(event, Finished) for event in reported):
                    yield from self.writebacks.drop(name)
                continue
            try:
                fresh = [new for event in reported if (new := request.accept(event, now)) is not None]
            except GapError as gap:
                yield from self._cancel(request)
                yield self._refuse(request, RequestError(str(gap), status=500))
                continue
            yield from self._update_records(request, reported, fresh, now)
            last = not request.open_choices
            if last:
                if request.decode and name not in self.workers[request.decode].decoding:
                    yield Send(request.decode, Cancel(name))  # it ended before its KV transfer
                refused = any(isinstance(event, Finished) and event.error for event in fresh)
                if refused:
                    yield from self._cancel(request)  # the other half of the pair still holds it
                self._end(request, now)
                if not refused:
                    yield from self.writebacks.begin(request, self.workers, now)
            if fresh or last:
                yield Deliver(name, fresh, last)
        yield from self._isolation.advance(now)

    def _update_records(
        self, request: OpenRequest, reported: list[Event], fresh: list[Event], now: float
    ) -> Iterator[Command]:
        """Update the fleet's records (admission, worker load, quarantine, KV reservation) from a request's
        events."""
        if any(isinstance(event, Admitted) for event in fresh):
            self._admission.started(now, len(request.opened.prompt))
        if request.worker and any(isinstance(event, Token) for event in fresh):
            self.workers[request.worker].started(request.opened.request, now)
            if request.decode is None:
                self._decodes(request)
            if not request.transferring and request.decoded:
                self.quarantine.progressed(request)
        if request.opened.open and any(isinstance(event, Progress) for event in fresh):
            self.quarantine.progressed(request)
        if any(isinstance(event, Admitted) and event.attempt == request.attempt for event in reported):
            request.planned = True
            yield from self._reserve(request)

    def _reserve(self, request: OpenRequest) -> Iterator[Command]:
        """Reserve KV blocks at the decode worker once the prompt is complete and its first chunk is
        scheduled."""
        due = request.planned and not request.opened.open and bool(request.open_choices)
        if due and request.decode and not request.reserving:
            request.reserving = True
            yield Send(request.decode, request.submit("decode"))

    def _transfer(self, worker: str, update: TransferUpdate, now: float) -> Iterator[Command]:
        known = ChainMap(self.requests, self.writebacks.open)
        request = known.get(update.request)
        if isinstance(update, Reserved):
            yield from self.writebacks.reserved(update.request)
            yield from self.reservations.reserved(worker, update, request)
            return
        commands, again = self.reservations.pushed(worker, update, known)
        yield from commands
        name = again.opened.request if again else update.request
        if name in self.writebacks.open:
            yield from self.writebacks.drop(name) if again else self.writebacks.complete(name)
        elif again:
            yield from self._cancel(again)
            yield from self._retry(again, f"its KV could not be transferred: {update.error}", now)
        elif request and request.decode and not request.transferring:
            self._decodes(request)

    def _decodes(self, request: OpenRequest) -> None:
        """Record that a request's prompt is computed and its KV is at the worker that decodes it."""
        worker = request.decode or request.worker
        if worker:
            self.workers[worker].decodes(request.opened.request)

    def _lost(self, event: WorkerLost, now: float) -> Iterator[Command]:
        """Blame the requests of the lost step; requeue all requests that depended on the worker."""
        if not self.supervisor.is_current(event.worker, event.incarnation):
            return
        affected = [request for request in self.requests.values() if request.depends_on(event.worker)]
        blamed, convicted = self.quarantine.worker_died(event.worker, affected, event.suspects)
        yield from self.supervisor.lose(event.worker, event.incarnation, event.reason, now, blamed)
        self.placement.view.forget(event.worker)
        yield from self.reservations.lose(event.worker)
        yield from self.writebacks.lose(event.worker)
        for request in affected:
            yield from self._withdraw(request, ended_worker=event.worker)
        for request in convicted:
            self.convicted += 1
            yield self._refuse(request, conviction(request, event))
        yield from self._fail_all(now)
        yield from self._isolation.advance(now)
        yield from self._place_waiting(now)

    def _withdraw(self, request: OpenRequest, ended_worker: str = "") -> Iterator[Command]:
        """Remove a request from its workers and prepare a next attempt that continues after the delivered
        tokens."""
        yield from self._cancel(request, ended_worker)
        self._leave(request)
        request.next_attempt(next(self._attempts))

    def _tick(self, event: Tick, now: float) -> Iterator[Command]:
        yield from self.supervisor.tick(now, event.beats)
        yield from self._isolation.tick(now)

    def _retry(self, request: OpenRequest, reason: str, now: float) -> Iterator[Command]:
        """Start another attempt that continues after the delivered tokens; refuse the request after
        `max_attempts` losses."""
        request.losses += 1
        self._leave(request)
        request.next_attempt(next(self._attempts))
        if request.losses >= self.config.max_attempts:
            message = f"this request was lost {request.losses} times: {reason}"
            yield self._refuse(request, RequestError(message, status=500))
        else:
            yield from self._place(request, now)

    def _cancel(self, request: OpenRequest, ended_worker: str = "") -> Iterator[Command]:
        """Cancel a request at all its workers except `ended_worker`."""
        for worker in sorted(request.workers - {ended_worker}):
            yield Send(worker, Cancel(request.opened.request))

    def _leave(self, request: OpenRequest) -> None:
        """Remove a request from the load records of its workers."""
        for name in request.workers:
            self.workers[name].leave(request.opened.request)

    def _end(self, request: OpenRequest, now: float) -> None:
        self._admission.finished(now)
        self.placement.ended(request)
        for worker in request.workers:
            self.workers[worker].recent_losses = 0
        self._forget(request)

    def _forget(self, request: OpenRequest) -> None:
        self._leave(request)
        del self.requests[request.name]
        self.quarantine.clear(request.name)

    def _unavailable(self, why: str, now: float) -> RequestError:
        return RequestError(why, status=503, retry_after=self.availability.retry_after(now))

    def _fail_all(self, now: float) -> Iterator[Command]:
        """Refuse all requests if no worker can serve them any more."""
        if not self.availability.can_serve:
            for request in list(self.requests.values()):
                yield from self._place(request, now)

    def _refuse(self, request: OpenRequest, error: RequestError) -> Command:
        self._forget(request)
        return Refuse(request.name, error)
