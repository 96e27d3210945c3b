"""The fleet's state machine, without input or output: events in, commands out. The asyncio and ZeroMQ runtime
around it is in `runtime`.

    API server  Open, Edit, Close, Drain,     ┌───────┐   Deliver, Refuse      → API server
                AddWorkers, RemoveWorkers,    │       │
                AddAdapter, RemoveAdapter     │       │
    workers     WorkerMessage, WorkerLost  →  │ Fleet │   Send                 → workers
    processes   WorkerLost, WorkerDead        │       │   Start, Kill, Retire  → processes
    clock       Tick                          └───────┘

For each request it stores the tokens that were delivered to the client. When a worker dies, its requests go
to another worker (or to the same one after its restart) as a new attempt that carries those tokens and
continues after them. It stores the latest version of each prompt stream, so an acknowledged edit is never
lost.
"""

from collections.abc import Iterator
from dataclasses import replace

from streamserve.fleet.adapters import AdapterBook
from streamserve.fleet.admission import Admission
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.delivery import Delivery
from streamserve.fleet.dispatcher import Dispatcher
from streamserve.fleet.events import (
    AddAdapter,
    AddWorkers,
    ClientEdit,
    Close,
    Command,
    Deliver,
    Drain,
    FleetEvent,
    Kill,
    Open,
    Refuse,
    RemoveAdapter,
    RemoveWorkers,
    Send,
    Tick,
    WorkerDead,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.isolation import Isolation, conviction
from streamserve.fleet.kept_outputs import NOTHING, KeptOutputStore
from streamserve.fleet.kv_transfers import KVTransfers
from streamserve.fleet.placement import Placement
from streamserve.fleet.quarantine import Quarantine
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.scaling import Scaling
from streamserve.fleet.supervisor import WorkerSupervisor
from streamserve.fleet.worker_state import WorkerState
from streamserve.protocol import messages
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    AdapterLoaded,
    Cached,
    Cancel,
    Events,
    Failed,
    KeptOutputs,
    OutputWithdrawn,
    Pushed,
    Ready,
    Transfers,
)
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.transfers import Hold

REPLACED = (
    "the model's files were replaced while this answer was generated, and no worker has the old model any "
    "more: send the request again"
)


class Fleet:
    """All workers and all open requests of one server."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.supervisor = WorkerSupervisor(config.topology, config.stuck_after)
        self.availability = self.supervisor.availability
        self.quarantine = Quarantine(self.availability.candidate_of, config.max_attempts)
        self.placement = Placement(self.availability, config.router, config.continue_tokens)
        self.dispatcher = Dispatcher(
            self.availability, self.placement, self.quarantine, config.max_attempts, config.slo_admission
        )
        self.requests = self.dispatcher.requests
        self.transfers = KVTransfers(self.availability, self.requests)
        self.adapters = AdapterBook(config.adapters, self.workers)
        self.kept = KeptOutputStore()
        self._admission = Admission(config.max_requests, config.max_waiting_tokens)
        self._delivery = Delivery(
            self.dispatcher, self.transfers, self.placement, self.quarantine, self._admission, self.workers
        )
        self.scaling = Scaling(
            config, self.supervisor, self.dispatcher, self.transfers, self.placement, self.quarantine,
            self.adapters,
        )  # fmt: skip
        self._isolation = Isolation(self.quarantine, self.availability, self.dispatcher)
        self.convicted = 0
        self.withdrawn = 0
        """Tokens of early answers that became void when an edit ended their attempt. Workers cannot count
        them: they only see that an attempt ends."""

    @property
    def workers(self) -> dict[str, WorkerState]:
        """The state of each worker, by name."""
        return self.supervisor.workers

    def start(self, now: float) -> list[Command]:
        """Return the commands that start the workers."""
        return [*self.supervisor.start(now)]

    def handle(self, event: FleetEvent, now: float) -> list[Command]:
        """Process one event; return the resulting commands in order."""
        commands = self._handle(event, now)
        commands += self.transfers.pushes.sweep(self.requests)
        return [*commands, *self.scaling.sweep(now), *self.adapters.sweep(self.requests.values())]

    def _handle(self, event: FleetEvent, now: float) -> list[Command]:
        match event:
            case Open():
                return list(self._open(event, now))
            case ClientEdit():
                return list(self._edit(event, now))
            case Close():
                return list(self._close(event, now))
            case Drain(worker, draining):
                # Waiting requests are placed at other workers; requests that run there continue.
                self.workers[worker].draining = draining
                return list(self.dispatcher.place_waiting(now))
            case AddWorkers():
                return list(self.scaling.add(event, now))
            case RemoveWorkers():
                return list(self.scaling.remove(event, now))
            case AddAdapter(adapter):
                return list(self.adapters.add(adapter))
            case RemoveAdapter(fingerprint):
                self.adapters.remove(fingerprint)
                return []
            case WorkerMessage():
                return list(self._heard(event, now))
            case WorkerLost():
                return list(self._lost(event, now))
            case WorkerDead(worker, incarnation):
                return [*self.transfers.reservations.writer_dead(worker, incarnation)]
            case Tick(beats):
                self.kept.expire(now)
                return [
                    *self.supervisor.tick(now, beats, self.dispatcher.some_wait),
                    *self._isolation.tick(now),
                    *self.scaling.tick(now),
                ]

    def health(self) -> tuple[bool, str]:
        """Return whether requests are being served, and if not, why."""
        return self.availability.health()

    def incidents(self) -> IncidentReport:
        """Return the incident counters: worker deaths; suspected, quarantined and convicted requests; workers
        and outputs that were taken over from another head."""
        return IncidentReport(
            deaths=self.supervisor.deaths,
            suspects=self.quarantine.suspected,
            quarantined=len(self.quarantine),
            convicted=self.convicted,
            adopted=self.supervisor.adopted,
            resumed_outputs=self.kept.resumed,
            resumed_tokens=self.kept.resumed_tokens,
        )

    def abandon(self, name: str, error: RequestError) -> list[Command]:
        """Cancel a request at all its workers and refuse it to its client."""
        request = self.requests.get(name)
        if request is None:
            return []
        return [*self.dispatcher.cancel(request), self.dispatcher.refuse(request, error)]

    def open_at(self, worker: str) -> int:
        """Return the number of requests that use a worker or its partner in a stream pair."""
        names = self.availability.topology.partners(worker)
        return sum(bool(names & request.workers) for request in self.requests.values())

    def edit_refusal(self, event: ClientEdit) -> RequestError | None:
        """Return why an edit must be rejected, or None. `handle` ignores such an edit."""
        request = self.requests.get(event.request)
        if request is None:
            return RequestError(f"there is no request {event.request}", status=404)
        return request.edit_refusal(event)

    def _open(self, event: Open, now: float) -> Iterator[Command]:
        refusal: RequestError | None
        if event.request in self.requests:
            refusal = RequestError(f"request id {event.request} is in use", status=409)
        else:
            refusal = self._admission.refusal(event, len(self.requests), self.dispatcher.waiting, now)
        if refusal is None and not self.adapters.serves(event.adapter):
            refusal = RequestError("the LoRA adapter has been unloaded", field="model", status=404)
        if refusal is None and (reason := self.availability.unavailable_reason()):
            refusal = self.dispatcher.unavailable(reason, now)
        if refusal:
            yield Refuse(event.request, refusal)
        else:
            ready = next((worker.ready for worker in self.workers.values() if worker.ready), None)
            kept = self.kept.find(ready.model.kv_name, event, now) if ready and event.keep else NOTHING
            yield from self.dispatcher.open(event, now, kept)

    def _edit(self, event: ClientEdit, now: float) -> Iterator[Command]:
        """Store the latest prompt for a next attempt. Output for an earlier version becomes void at once."""
        if self.edit_refusal(event):
            return
        request = self.requests[event.request]
        edited = request.edit(event, now)
        if not request.admitted:
            self.dispatcher.waiting.add(request.name, len(request.opened.prompt))
        if request.worker is None:
            yield from self.dispatcher.place(request, now)
        elif edited.changed and request.decode and request.opened.answer_early:
            # Each version of the answer is handed over to the decode worker, so each is a separate attempt.
            # The workers' caches have the retained prefix.
            yield from self.dispatcher.reroute(request, now, new_attempt=True)
            self.withdrawn += edited.withdrawn
        else:
            moved = event.finish and not request.opened.answer_early and not request.isolated
            commands = list(self.dispatcher.reroute(request, now)) if moved else []
            yield from commands or self._forward_edit(request, event, now)
        if edited.withdrawn:
            notice = OutputWithdrawn(event.request, request.attempt, event.version)
            yield Deliver(event.request, [notice], last=False)

    def _forward_edit(self, request: OpenRequest, event: ClientEdit, now: float) -> Iterator[Command]:
        """Pass an edit on to the workers that have the prompt stream."""
        params = request.limited(event.params) if event.params else None
        message = messages.Edit(
            event.request, request.attempt, event.version, event.retained, event.tokens, event.finish,
            params, event.tail, now,
        )  # fmt: skip
        if request.worker and not request.opened.answer_early and self.dispatcher.holds(request):
            request.hold = True
            yield Send(request.worker, Hold(request.name, request.attempt))
        for worker in (request.worker, request.decode if request.reserving else None):
            if worker:
                yield Send(worker, message)
        self.dispatcher.update_load(request, now)
        yield from self.transfers.reserve(request)

    def _close(self, event: Close, now: float) -> Iterator[Command]:
        request = self.requests.get(event.request)
        if request is None:
            return
        if event.choice is None:
            request.open_choices = frozenset()
        else:
            request.open_choices -= {event.choice}
            request.transferring -= {event.choice}
        for worker in sorted(request.workers):
            yield Send(worker, Cancel(event.request, event.choice))
        if not request.open_choices:
            self._delivery.finish(request, now)

    def _heard(self, event: WorkerMessage, now: float) -> Iterator[Command]:
        worker = self.supervisor.hear(event.worker, event.incarnation, now)
        if worker is None:
            return
        match event.message:
            case Ready():
                before = self.supervisor.served
                if self.supervisor.join(event.worker, event.message, now):
                    if before and before.model.kv_name != event.message.model.kv_name:
                        yield from self.dispatcher.end_answers(REPLACED)
                    yield from self.adapters.joined(event.worker)
                    yield from self._isolation.advance(now)
                    yield from self.dispatcher.place_waiting(now)
                else:
                    yield Kill(event.worker, worker.error)
                    yield from self.supervisor.outdated(now)
                    yield from self.dispatcher.refuse_unservable(now)
            case KeptOutputs():
                self.kept.add(event.message, now)
            case AdapterLoaded():
                self.adapters.answered(event.worker, event.message)
            case Failed():
                self.supervisor.fail(event.worker, event.message)
                yield from self.supervisor.outdated(now)
                yield from self.dispatcher.refuse_unservable(now)
            case Report():
                worker.reported(event.message)
            case Cached():
                self.placement.view.update(event.worker, event.message, worker.blocks)
            case Events():
                yield from self._delivery.deliver(event.message.events, now)
                yield from self._isolation.advance(now)
            case Transfers():
                for update in event.message.updates:
                    sends, again = self.transfers.update(event.worker, update, now)
                    yield from sends
                    if again and isinstance(update, Pushed):
                        reason = f"its KV could not be transferred: {update.error}"
                        yield from self.dispatcher.retry(again, reason, now)

    def _lost(self, event: WorkerLost, now: float) -> Iterator[Command]:
        """Process the loss of a worker: blame the requests of its last step, and requeue all requests that
        depended on it."""
        if not self.supervisor.is_current(event.worker, event.incarnation):
            return
        worker = self.workers[event.worker]
        event = replace(event, reason=worker.last_words or event.reason)
        ending = worker.condemned or event.ending
        affected = [request for request in self.requests.values() if request.depends_on(event.worker)]
        blamed, convicted = self.quarantine.worker_died(event.worker, affected, event.suspects, ending)
        yield from self.supervisor.lose(event.worker, event.reason, now, blamed)
        self.placement.view.forget(event.worker)
        self.adapters.lost(event.worker)
        yield from self.transfers.lose(event.worker, now, event.incarnation, event.dead)
        for request in affected:
            yield from self.dispatcher.withdraw(request, ended_worker=event.worker)
        for request in convicted:
            self.convicted += 1
            yield self.dispatcher.refuse(request, conviction(request, event))
        yield from self.dispatcher.refuse_unservable(now)
        yield from self._isolation.advance(now)
        yield from self.dispatcher.place_waiting(now)
