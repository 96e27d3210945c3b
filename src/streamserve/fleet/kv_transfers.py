"""The KV transfers of a fleet: of open requests from prefill to decode workers (reservations.py), and of
finished ones back (kv_writeback.py)."""

from collections import ChainMap
from collections.abc import Iterator, Mapping

from streamserve.fleet.events import Command, Send
from streamserve.fleet.kv_writeback import WritebackManager
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.reservations import ReservationBook
from streamserve.fleet.worker_state import Topology, WorkerState
from streamserve.protocol.messages import Reserved, TransferUpdate


class KVTransfers:
    """The transfers for the open `requests` among `workers`."""

    def __init__(
        self, topology: Topology, workers: Mapping[str, WorkerState], requests: dict[str, OpenRequest]
    ) -> None:
        self.reservations = ReservationBook()
        self.writebacks = WritebackManager(topology)
        self._workers = workers
        self._requests = requests

    def reserve(self, request: OpenRequest) -> Iterator[Command]:
        """Reserve KV blocks at the decode worker once the prompt is complete and its first chunk is
        scheduled."""
        due = request.planned and not request.opened.open and bool(request.open_choices)
        if due and request.decode and not request.reserving:
            request.reserving = True
            yield Send(request.decode, request.submit("decode"))

    def update(self, worker: str, update: TransferUpdate) -> tuple[list[Command], OpenRequest | None]:
        """Process a worker's report. Returns what to send, and the open request that has to start over, if
        any."""
        known = ChainMap(self._requests, self.writebacks.open)
        request = known.get(update.request)
        if isinstance(update, Reserved):
            begun = self.writebacks.reserved(update.request)
            return [*begun, *self.reservations.reserved(worker, update, request)], None
        sends, again = self.reservations.pushed(worker, update, known)
        name = again.name if again else update.request
        if name in self.writebacks.open:
            ended = self.writebacks.drop(name) if again else self.writebacks.complete(name)
            return [*sends, *ended], None
        if again is None and request and request.decode and not request.transferring:
            self.decodes(request)
        return [*sends], again

    def decodes(self, request: OpenRequest) -> None:
        """Record that a request's prompt is computed and its KV is at the worker that decodes it."""
        worker = request.decode or request.worker
        if worker:
            self._workers[worker].decodes(request.name)

    def finished(self, request: OpenRequest, now: float) -> Iterator[Command]:
        """Start the write-back of a finished request, if it is worth it."""
        return self.writebacks.begin(request, self._workers, now)

    def lose(self, worker: str, incarnation: int = 0, dead: bool = True) -> Iterator[Command]:
        """End the transfers of a lost worker. The blocks that it may write stay closed until it is `dead`."""
        yield from self.reservations.lose(worker, incarnation, dead)
        yield from self.writebacks.lose(worker)
