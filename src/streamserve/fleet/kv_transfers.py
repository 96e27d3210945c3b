"""The KV transfers of a fleet:

- of open requests, from prefill to decode workers (reservations.py);
- of prompt streams while they arrive (stream_pushes.py);
- of finished requests, back to prefill workers (kv_writeback.py).
"""

from collections import ChainMap

from streamserve.fleet.availability import Availability
from streamserve.fleet.cache_copies import CacheCopies
from streamserve.fleet.events import Command, Send
from streamserve.fleet.kv_writeback import begin_writeback
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.reservations import ReservationBook
from streamserve.fleet.stream_pushes import StreamPushes
from streamserve.protocol.messages import Deferred, Reserved, TransferUpdate
from streamserve.protocol.transfers import Hold, Push


class KVTransfers:
    """The transfers of the open `requests` among the workers. Messages to workers are appended to
    `commands`."""

    def __init__(
        self, availability: Availability, requests: dict[str, OpenRequest], commands: list[Command]
    ) -> None:
        self.reservations = ReservationBook(commands)
        self.copies = CacheCopies(commands)
        self.pushes = StreamPushes(availability.workers, self.copies)
        self._availability = availability
        self._workers = availability.workers
        self._requests = requests
        self._commands = commands

    def reserve(self, request: OpenRequest, hold: bool = False) -> None:
        """Reserve KV blocks at the decode worker, once the prompt is complete (or answered early) and its
        first chunk is scheduled. With `hold`, the first token waits for the reservation: reserve at once."""
        complete = not request.opened.open or request.opened.answer_early
        begun = request.status is RequestStatus.RUNNING or (hold and request.status is RequestStatus.QUEUED)
        if begun and complete and request.open_choices and request.decode:
            request.become(RequestStatus.RESERVING)
            self.pushes.finish(request)
            self._commands.append(Send(request.decode, request.submit("decode")))

    def update(self, worker: str, update: TransferUpdate, now: float) -> OpenRequest | None:
        """Process a worker's report. Return the open request that has to start over, or None."""
        known = ChainMap(self._requests, self.copies.open)
        request = known.get(update.request)
        if isinstance(update, Deferred):
            self._deferred(worker, update)
            return None
        if isinstance(update, Reserved):
            self._workers[worker].deferring.discard(update.request)
            if writer := self.reservations.reserved(worker, update, request):
                self.copies.reserved(update.request)
                self._commands.append(Send(writer, Push(update.reservation)))
            return None
        again = self.reservations.pushed(worker, update, known)
        name = again.name if again else update.request
        if name in self.copies.open:
            self.end_copy(name, again is None, now)
            return None
        if again is None and request and request.decode and not request.transferring:
            self.decodes(request, now)
        return again

    def _deferred(self, worker: str, update: Deferred) -> None:
        """Hold back the first token of a request whose reservation is deferred, unless the token was already
        delivered."""
        request = self._requests.get(update.request)
        if request and (request.attempt, request.decode) == (update.attempt, worker):
            self._workers[worker].deferring.add(request.name)
            if request.worker and not any(request.outputs.values()):
                self._commands.append(Send(request.worker, Hold(request.name, request.attempt)))

    def end_copy(self, name: str, landed: bool, now: float, ended_worker: str = "") -> None:
        """End a cache copy: if it has not landed, drop it at all its workers except `ended_worker`."""
        if landed:
            self.copies.complete(name)
        else:
            self.copies.drop(name, ended_worker)
        self.pushes.ended(name, landed, now)

    def decodes(self, request: OpenRequest, now: float) -> None:
        """Record that a request's prompt is computed and its KV is at the worker that decodes."""
        if request.worker:
            self._workers[request.worker].started(request.name, now)
        worker = request.decode or request.worker
        if worker:
            self._workers[worker].decodes(request.name)

    def finished(self, request: OpenRequest, now: float) -> None:
        """Start the write-back of a finished request, if the prefill worker lacks blocks of it."""
        begin_writeback(request, self._availability, self.copies, now)

    def involve(self, worker: str) -> bool:
        """Return whether a worker may read, write or receive KV of a transfer."""
        return bool(self.reservations.involve(worker) or self.copies.of(worker))

    def lose(self, worker: str, now: float, incarnation: int = 0, dead: bool = True) -> None:
        """End the transfers of a lost worker, and forget what was pushed to it. Blocks that it may still
        write stay closed until it is `dead`."""
        self.reservations.lose(worker, incarnation, dead)
        for request in self._requests.values():
            if request.decode == worker:
                request.arriving.pushed = 0
        for name in self.copies.of(worker):
            self.end_copy(name, False, now, worker)
