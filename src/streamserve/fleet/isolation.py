"""Runs the trials of suspect requests (quarantine.py): when a trial begins, on which workers, and which
requests have to leave these workers."""

from streamserve.fleet.availability import Availability
from streamserve.fleet.dispatcher import Dispatcher
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.quarantine import Quarantine, Trial
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.errors import RequestError


class Isolation:
    """Runs the trials of `quarantine` among the requests of `dispatcher`."""

    def __init__(self, quarantine: Quarantine, availability: Availability, dispatcher: Dispatcher) -> None:
        self._quarantine = quarantine
        self._availability = availability
        self._dispatcher = dispatcher
        self._requests = dispatcher.requests

    def advance(self, now: float) -> None:
        """Begin the next trial if its workers are ready. If no suspects are left, route the requests that
        waited."""
        was_active = bool(self._quarantine.workers)
        group = self._quarantine.next(self._requests)
        if group is None or now < self._quarantine.recess_until:
            if was_active and not self._quarantine.reserved(now):
                self._dispatcher.place_waiting(now)
            return
        workers = self._trial_workers()
        if not self._availability.is_healthy(workers):
            return
        self._quarantine.begin(workers, now)
        for request in list(self._requests.values()):
            if request.workers & workers:
                self._dispatcher.withdraw(request)
        self._dispatcher.place_waiting(now)

    def tick(self, now: float) -> None:
        """Suspend a trial if other requests have waited for it too long, or if its workers leave or are no
        longer combined."""
        trial = self._quarantine.trial
        if trial and (
            not self._availability.placing.complete(trial.workers)
            or (trial.overdue(now) and self._blocks_others(trial))
        ):
            for name in self._quarantine.suspend(now):
                if name in self._requests:
                    self._dispatcher.withdraw(self._requests[name])
            self._dispatcher.place_waiting(now)
        self.advance(now)

    def _trial_workers(self) -> frozenset[str]:
        """Return the workers for trials: the workers of the first death, or other workers if these cannot
        serve or may not get new requests."""
        serving, workers = self._availability.open(), self._quarantine.workers
        placing = self._availability.placing
        if serving.issuperset(workers) and placing.complete(workers):
            return workers
        return next((other for other in placing.candidates() if serving.issuperset(other)), workers)

    def _blocks_others(self, trial: Trial) -> bool:
        """Return whether requests outside the trial wait for its end."""
        waiting = (
            name
            for name, request in self._requests.items()
            if request.status is RequestStatus.WAITING and request.placeable
        )
        return any(name not in trial.group.members and not self._quarantine.waits(name) for name in waiting)


def conviction(request: OpenRequest, event: WorkerLost) -> RequestError:
    """Return the error for the client of a request that was convicted of ending its workers."""
    suspicion = request.suspicion
    alone = suspicion.tries + suspicion.killed_alone
    how = f"{alone} times while it ran alone" if alone else f"in {suspicion.strikes} steps"
    phase = f", in phase {event.phase}" if event.phase else ""
    where = f"; crash report {event.report}" if event.report else ""
    message = f"request {request.name} ended its worker {how}{phase}: {event.reason}{where}"
    return RequestError(message, status=500)
