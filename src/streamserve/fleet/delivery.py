"""The delivery of workers' events to clients, and the updates of the fleet's records from them.

Events ──▶ Delivery ──▶ Deliver, Refuse             each event once, in order
               └──▶ admission's rates, worker loads, trials, KV reservations and write-backs
"""

from streamserve.fleet.admission import Admission
from streamserve.fleet.dispatcher import Dispatcher
from streamserve.fleet.events import Command, Deliver, Send
from streamserve.fleet.kv_transfers import KVTransfers
from streamserve.fleet.placement import Placement
from streamserve.fleet.quarantine import Quarantine
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import GapError, OpenRequest
from streamserve.fleet.worker_state import WorkerState
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Admitted, Cancel, Event, Finished, Progress, Token


class Delivery:
    """Passes events of the dispatcher's requests on to clients, by `Deliver` in `commands`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        transfers: KVTransfers,
        placement: Placement,
        quarantine: Quarantine,
        admission: Admission,
        workers: dict[str, WorkerState],
        commands: list[Command],
    ) -> None:
        self._dispatcher = dispatcher
        self._transfers = transfers
        self._placement = placement
        self._quarantine = quarantine
        self._admission = admission
        self._workers = workers
        self._commands = commands

    def deliver(self, events: list[Event], now: float) -> None:
        """Deliver the new events of each request, in one batch per request."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        for name, reported in by_request.items():
            request = self._dispatcher.requests.get(name)
            if request is not None:
                self._deliver(request, reported, now)
            elif any(isinstance(event, Finished) for event in reported):
                self._transfers.end_copy(name, False, now)

    def finish(self, request: OpenRequest, now: float) -> None:
        """Forget a request that is over: record its cached blocks, and reset its workers' counts of recent
        losses."""
        self._admission.finished(now)
        self._placement.ended(request)
        for worker in request.workers:
            self._workers[worker].recent_losses = 0
        self._dispatcher.forget(request)

    def _deliver(self, request: OpenRequest, reported: list[Event], now: float) -> None:
        try:
            fresh = [new for event in reported if (new := request.accept(event, now)) is not None]
        except GapError as gap:
            self._dispatcher.cancel(request)
            self._dispatcher.refuse(request, RequestError(str(gap), status=500))
            return
        self._update_records(request, reported, fresh, now)
        last = not request.open_choices
        if last:
            if request.decode and request.name not in self._workers[request.decode].decoding:
                # The request ended before its KV transfer.
                self._commands.append(Send(request.decode, Cancel(request.name)))
            refused = any(isinstance(event, Finished) and event.error for event in fresh)
            if refused:
                # The other half of the pair still has the request.
                self._dispatcher.cancel(request)
            self.finish(request, now)
            if not refused:
                self._transfers.finished(request, now)
        if fresh or last:
            self._commands.append(Deliver(request.name, fresh, last))

    def _update_records(
        self, request: OpenRequest, reported: list[Event], fresh: list[Event], now: float
    ) -> None:
        """Update the fleet's records (admission, worker load, quarantine, KV reservation) from a request's
        events."""
        if any(isinstance(event, Admitted) for event in fresh):
            self._admission.started(now, len(request.opened.prompt))
            self._dispatcher.waiting.discard(request.name)
        if request.worker and any(isinstance(event, Token) for event in fresh):
            self._workers[request.worker].started(request.name, now)
            if request.decode is None:
                self._transfers.decodes(request, now)
            if not request.transferring and request.decoded:
                self._quarantine.progressed(request)
        if request.opened.open and any(isinstance(event, Progress) for event in fresh):
            self._quarantine.progressed(request)
            self._dispatcher.update_load(request, now)
            self._transfers.pushes.advance(request, now)
        if any(isinstance(event, Admitted) and event.attempt == request.attempt for event in reported):
            if request.status is RequestStatus.QUEUED:
                request.become(RequestStatus.RUNNING)
            self._transfers.reserve(request)
