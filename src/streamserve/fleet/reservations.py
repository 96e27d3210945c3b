"""The open transfer reservations of a fleet: which worker may write KV to which, until the write is known to
be over.

Reserved  ──▶  ReservationBook  ──▶  Push to the writer, or Release if the request no longer needs it
Pushed                               Join to the owner, or Release if its KV is missing
"""

from collections.abc import Mapping
from dataclasses import dataclass

from streamserve.fleet.events import Command, Send
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import NO_CHOICES, OpenRequest
from streamserve.protocol.messages import Pushed, Reserved
from streamserve.protocol.transfers import Join, Push, Release, TransferReservation


@dataclass(frozen=True)
class OpenReservation:
    """Permission for the worker `writer` to write into blocks of the worker `owner`."""

    reservation: TransferReservation
    writer: str
    owner: str


class ReservationBook:
    """All transfer reservations that may still be written to. Messages to workers are appended to
    `commands`."""

    def __init__(self, commands: list[Command]) -> None:
        self._commands = commands
        self._open: dict[str, OpenReservation] = {}
        self._doubtful: dict[tuple[str, int], list[OpenReservation]] = {}
        """Reservations whose writers were lost but may still write, by name and incarnation of the writer."""

    def __len__(self) -> int:
        return len(self._open) + sum(map(len, self._doubtful.values()))

    def involve(self, worker: str) -> bool:
        """Return whether a worker may still write KV, or may still be written to."""
        doubtful = (entry for entries in self._doubtful.values() for entry in entries)
        return any(worker in (entry.writer, entry.owner) for entry in (*self._open.values(), *doubtful))

    def reserved(self, owner: str, update: Reserved, request: OpenRequest | None) -> str | None:
        """Process a reservation of blocks: open it if the request still needs it, else release it. Return the
        writer that the reservation is to be sent to, or None. A reservation that is already open is neither
        sent nor released again."""
        reservation = update.reservation
        current = request is not None and request.attempt == update.attempt and request.decode == owner
        own = (reservation.request, reservation.attempt) == (update.request, update.attempt)
        if reservation.id in self._open:
            return None
        if request is None or not current or not own or request.worker is None:
            self._commands.append(Send(owner, Release(reservation.id)))
            return None
        self._open[reservation.id] = OpenReservation(reservation, request.worker, owner)
        if request.status is RequestStatus.RESERVING:
            request.become(RequestStatus.RESERVED)
        return request.worker

    def pushed(self, worker: str, update: Pushed, requests: Mapping[str, OpenRequest]) -> OpenRequest | None:
        """Process the end of a transfer: the reservation's choices decode at the owner, unless their KV is
        missing. Return the request that has to start over, or None.

        The stored entry takes precedence over the report, and only the reservation's writer can close it.
        """
        entry = self._open.get(update.reservation_id)
        if entry and worker != entry.writer:
            return None
        self._open.pop(update.reservation_id, None)
        reported = (update.request, update.attempt)
        name, attempt = (entry.reservation.request, entry.reservation.attempt) if entry else reported
        request = requests.get(name)
        if request and request.attempt != attempt:
            request = None
        arrived = request.transferring & set(entry.reservation.choices) if request and entry else NO_CHOICES
        if request and entry and arrived and reported == (name, attempt) and not update.error:
            self._join(entry, update, request, arrived)
            return None
        if entry:
            self._release(entry, update.doubtful)
        else:
            self._resend(worker, reported)
        if request is None:
            return None
        # The writer has ended a transfer that is not stored here, so no Join would ever follow.
        unknown = entry is None and worker == request.worker and bool(request.transferring)
        again = bool(arrived) or unknown or worker == request.decode
        return request if again else None

    def _join(
        self, entry: OpenReservation, update: Pushed, request: OpenRequest, arrived: frozenset[int]
    ) -> None:
        """Let the owner decode the choices whose KV has arrived."""
        request.transferring -= arrived
        choices = sorted(arrived & request.outputs.keys())
        outputs = {choice: list(request.outputs[choice]) for choice in choices}
        began = {choice: request.first_token_at[choice] for choice in choices if outputs[choice]}
        join = Join(request.name, request.attempt, update.reservation_id, outputs, began, update.groups)
        self._commands.append(Send(entry.owner, join))

    def _resend(self, worker: str, reported: tuple[str, int]) -> None:
        """Handle a worker's report of an unknown reservation. The worker may have received it in place of a
        stored one, so the stored reservations of this request are sent again. The worker refuses a
        reservation that it has never seen, and the blocks are then free."""
        entries = [entry for entry in self._open.values() if entry.writer == worker]
        own = [
            entry.reservation
            for entry in entries
            if (entry.reservation.request, entry.reservation.attempt) == reported
        ]
        self._commands.extend(Send(worker, Push(reservation)) for reservation in own)

    def lose(self, worker: str, incarnation: int = 0, dead: bool = True) -> None:
        """Close the reservations of a lost worker, both as writer and as owner. Owners that still run may
        reuse the blocks once the writer is `dead`."""
        lost = [entry for entry in self._open.values() if worker in (entry.writer, entry.owner)]
        written = [entry for entry in lost if entry.owner != worker]
        for entry in lost:
            del self._open[entry.reservation.id]
        for key, entries in self._doubtful.items():  # an owner that was lost has no blocks to reuse
            self._doubtful[key] = [entry for entry in entries if entry.owner != worker]
        if not dead:
            self._doubtful[worker, incarnation] = written
            return
        for entry in written:
            self._release(entry, doubtful=True)

    def writer_dead(self, worker: str, incarnation: int) -> None:
        """Release the blocks of a lost writer that certainly writes no more. Bytes that it sent may still
        arrive."""
        for entry in self._doubtful.pop((worker, incarnation), []):
            self._release(entry, doubtful=True)

    def _release(self, entry: OpenReservation, doubtful: bool) -> None:
        self._commands.append(Send(entry.owner, Release(entry.reservation.id, doubtful)))
