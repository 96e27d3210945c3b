"""The fleet's state machine, without input or output: events in, commands out. The asyncio and ZeroMQ runtime
around it is in `runtime`.

    API server  Open, Edit, Close, Drain,     ┌───────┐   Deliver, Refuse      → API server
                AddWorkers, RemoveWorkers,    │       │
                AddAdapter, RemoveAdapter     │       │
    workers     WorkerMessage, WorkerLost  →  │ Fleet │   Send                 → workers
    processes   WorkerLost, WorkerDead        │       │   Start, Kill, Retire  → processes
    clock       Tick                          └───────┘

All parts of the fleet append their commands to one list, `Fleet.commands`, which `Fleet.handle` returns.

For each request it stores the tokens that were delivered to the client. When a worker dies, its requests go
to another worker (or to the same one after its restart) as a new attempt that carries those tokens and
continues after them. It stores the latest version of each prompt stream, so an acknowledged edit is never
lost.
"""

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
from streamserve.fleet.request_status import RequestStatus
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
        self.commands: list[Command] = []
        """The commands of the event that is being handled, in order. All parts of the fleet append to it."""
        self.supervisor = WorkerSupervisor(config.topology, config.stuck_after, self.commands)
        self.availability = self.supervisor.availability
        self.quarantine = Quarantine(self.availability.candidate_of, config.max_attempts)
        self.placement = Placement(self.availability, config.router, config.continue_tokens)
        self.adapters = AdapterBook(config.adapters, self.workers, self.commands)
        self.dispatcher = Dispatcher(
            self.availability, self.placement, self.quarantine, self.adapters, config.max_attempts,
            config.slo_admission, self.commands,
        )  # fmt: skip
        self.requests = self.dispatcher.requests
        self.transfers = KVTransfers(self.availability, self.requests, self.commands)
        self.kept = KeptOutputStore()
        self._admission = Admission(config.max_requests, config.max_waiting_tokens)
        self._delivery = Delivery(
            self.dispatcher, self.transfers, self.placement, self.quarantine, self._admission, self.workers,
            self.commands,
        )  # fmt: skip
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
        return self.supervisor.workers

    def start(self, now: float) -> list[Command]:
        """Return the commands that start the workers."""
        self.commands.clear()
        self.supervisor.start(now)
        return self.commands.copy()

    def handle(self, event: FleetEvent, now: float) -> list[Command]:
        """Process one event; return the resulting commands in order."""
        self.commands.clear()  # if the handling of an event raised, its commands are dropped
        self._handle(event, now)
        self.transfers.pushes.sweep(self.requests)
        self.scaling.sweep(now)
        self.adapters.sweep(self.requests.values())
        return self.commands.copy()

    def _handle(self, event: FleetEvent, now: float) -> None:
        match event:
            case Open():
                self._open(event, now)
            case ClientEdit():
                self._edit(event, now)
            case Close():
                self._close(event, now)
            case Drain(worker, draining):
                # Waiting requests are placed at other workers; requests that run there continue.
                self.workers[worker].draining = draining
                self.dispatcher.place_waiting(now)
            case AddWorkers():
                self.scaling.add(event, now)
            case RemoveWorkers():
                self.scaling.remove(event, now)
            case AddAdapter(adapter):
                self.adapters.add(adapter)
            case RemoveAdapter(fingerprint):
                self.adapters.remove(fingerprint)
            case WorkerMessage():
                self._heard(event, now)
            case WorkerLost():
                self._lost(event, now)
            case WorkerDead(worker, incarnation):
                self.transfers.reservations.writer_dead(worker, incarnation)
            case Tick(beats):
                self.kept.expire(now)
                self.supervisor.tick(now, beats, self.dispatcher.some_wait)
                self._isolation.tick(now)
                self.scaling.tick(now)

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
        self.commands.clear()
        if request := self.requests.get(name):
            self.dispatcher.cancel(request)
            self.dispatcher.refuse(request, error)
        return self.commands.copy()

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

    def _open(self, event: Open, now: float) -> None:
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
            self.commands.append(Refuse(event.request, refusal))
        else:
            ready = next((worker.ready for worker in self.workers.values() if worker.ready), None)
            kept = self.kept.find(ready.model.kv_name, event, now) if ready and event.keep else NOTHING
            self.dispatcher.open(event, now, kept)

    def _edit(self, event: ClientEdit, now: float) -> None:
        """Store the latest prompt for a next attempt. Output for an earlier version becomes void at once."""
        if self.edit_refusal(event):
            return
        request = self.requests[event.request]
        edited = request.edit(event, now)
        if not request.admitted:
            self.dispatcher.waiting.add(request.name, len(request.opened.prompt))
        if request.status is RequestStatus.WAITING:
            self.dispatcher.place(request, now)
        elif edited.changed and request.decode and request.opened.answer_early:
            # Each version of the answer is handed over to the decode worker, so each is a separate attempt.
            # The workers' caches have the retained prefix.
            self.dispatcher.reroute(request, now, new_attempt=True)
            self.withdrawn += edited.withdrawn
        else:
            moved = event.finish and not request.opened.answer_early and not request.isolated
            if not (moved and self.dispatcher.reroute(request, now)):
                self._forward_edit(request, event, now)
        if edited.withdrawn:
            notice = OutputWithdrawn(event.request, request.attempt, event.version)
            self.commands.append(Deliver(event.request, [notice], last=False))

    def _forward_edit(self, request: OpenRequest, event: ClientEdit, now: float) -> None:
        """Pass an edit on to the workers that have the prompt stream."""
        params = request.limited(event.params) if event.params else None
        message = messages.Edit(
            event.request, request.attempt, event.version, event.retained, event.tokens, event.finish,
            params, event.tail, now,
        )  # fmt: skip
        hold = not request.opened.answer_early and self.dispatcher.holds(request)
        if request.worker and hold:
            self.commands.append(Send(request.worker, Hold(request.name, request.attempt)))
        for worker in (request.worker, request.decode if request.status.at_decode_worker else None):
            if worker:
                self.commands.append(Send(worker, message))
        self.dispatcher.update_load(request, now)
        self.transfers.reserve(request, hold)

    def _close(self, event: Close, now: float) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        if event.choice is None:
            request.open_choices = frozenset()
        else:
            request.open_choices -= {event.choice}
            request.transferring -= {event.choice}
        for worker in sorted(request.workers):
            self.commands.append(Send(worker, Cancel(event.request, event.choice)))
        if not request.open_choices:
            self._delivery.finish(request, now)

    def _heard(self, event: WorkerMessage, now: float) -> None:
        worker = self.supervisor.hear(event.worker, event.incarnation, now)
        if worker is None:
            return
        match event.message:
            case Ready():
                before = self.supervisor.served
                if self.supervisor.join(event.worker, event.message, now):
                    if before and before.model.kv_name != event.message.model.kv_name:
                        self.dispatcher.end_answers(REPLACED)
                    self.adapters.joined(event.worker)
                    self._isolation.advance(now)
                    self.dispatcher.place_waiting(now)
                else:
                    self.commands.append(Kill(event.worker, worker.error))
                    self.supervisor.outdated(now)
                    self.dispatcher.refuse_unservable(now)
            case KeptOutputs():
                self.kept.add(event.message, now)
            case AdapterLoaded():
                self.adapters.answered(event.worker, event.message)
                self.dispatcher.place_waiting(now)
            case Failed():
                self.supervisor.fail(event.worker, event.message)
                self.supervisor.outdated(now)
                self.dispatcher.refuse_unservable(now)
            case Report():
                worker.reported(event.message)
            case Cached():
                self.placement.view.update(event.worker, event.message, worker.blocks)
            case Events():
                self._delivery.deliver(event.message.events, now)
                self._isolation.advance(now)
            case Transfers():
                for update in event.message.updates:
                    again = self.transfers.update(event.worker, update, now)
                    if again and isinstance(update, Pushed):
                        reason = f"its KV could not be transferred: {update.error}"
                        self.dispatcher.retry(again, reason, now)

    def _lost(self, event: WorkerLost, now: float) -> None:
        """Process the loss of a worker: blame the requests of its last step, and requeue all requests that
        depended on it."""
        if not self.supervisor.is_current(event.worker, event.incarnation):
            return
        worker = self.workers[event.worker]
        event = replace(event, reason=worker.last_words or event.reason)
        ending = worker.condemned or event.ending
        affected = [request for request in self.requests.values() if request.depends_on(event.worker)]
        blamed, convicted = self.quarantine.worker_died(event.worker, affected, event.suspects, ending)
        self.supervisor.lose(event.worker, event.reason, now, blamed)
        self.placement.view.forget(event.worker)
        self.adapters.lost(event.worker)
        self.transfers.lose(event.worker, now, event.incarnation, event.dead)
        for request in affected:
            self.dispatcher.withdraw(request, ended_worker=event.worker)
        for request in convicted:
            self.convicted += 1
            self.dispatcher.refuse(request, conviction(request, event))
        self.dispatcher.refuse_unservable(now)
        self._isolation.advance(now)
        self.dispatcher.place_waiting(now)
