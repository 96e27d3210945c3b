"""The fleet's open transfer reservations: which worker may write KV to which, until the write is known to be
over.

Reserved  ──▶  ReservationBook  ──▶  Push to the writer, or Release if the request no longer needs it
Pushed                          Join to the owner, or Release if its KV is missing
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streamserve.fleet.events import Send
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.messages import Pushed, Reserved
from streamserve.protocol.tickets import Join, Push, Release, TransferReservation


@dataclass(frozen=True)
class OpenReservation:
    """Permission for the worker `writer` to write into blocks of the worker `owner`."""

    ticket: TransferReservation
    writer: str
    owner: str


class ReservationBook:
    """All transfer reservations that may still be written to."""

    def __init__(self) -> None:
        self._open: dict[str, OpenReservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    def reserved(self, owner: str, news: Reserved, request: OpenRequest | None) -> list[Send]:
        """Process a reservation of blocks: send it to its writer if the request still needs it, else release
        it. A reservation that is open already is neither sent nor released again."""
        ticket = news.ticket
        wanted = request is not None and request.attempt == news.attempt and request.decode == owner
        own = (ticket.request, ticket.attempt) == (news.request, news.attempt)
        if ticket.id in self._open:
            return []
        if request is None or not wanted or not own or request.worker is None:
            return [Send(owner, Release(ticket.id))]
        self._open[ticket.id] = OpenReservation(ticket, request.worker, owner)
        return [Send(request.worker, Push(ticket))]

    def pushed(
        self, worker: str, news: Pushed, requests: Mapping[str, OpenRequest]
    ) -> tuple[list[Send], OpenRequest | None]:
        """Process the end of a transfer: the reservation's choices decode at the owner, unless their KV is
        missing. Returns what to send, and the request that has to start over, if any. The stored entry takes
        precedence over the report, and only the reservation's writer can close it."""
        entry = self._open.get(news.ticket)
        if entry and worker != entry.writer:
            return [], None
        self._open.pop(news.ticket, None)
        told = (news.request, news.attempt)
        name, attempt = (entry.ticket.request, entry.ticket.attempt) if entry else told
        request = requests.get(name)
        closing = _released(entry) if entry else self._ask_again(worker, told)
        if request is None or request.attempt != attempt:
            return closing, None
        going = request.handing & set(entry.ticket.choices) if entry else set()
        if entry and going and told == (name, attempt) and not news.error:
            request.handing -= going
            choices = sorted(going & request.outputs.keys())
            outputs = {choice: list(request.outputs[choice]) for choice in choices}
            began = {choice: request.began[choice] for choice in choices}
            join = Join(name, attempt, news.ticket, outputs, began, news.planes)
            return [Send(entry.owner, join)], None
        unknown = entry is None and worker == request.worker and bool(request.handing)
        again = bool(going) or unknown or worker == request.decode
        return closing, request if again else None

    def _ask_again(self, worker: str, told: tuple[str, int]) -> list[Send]:
        """Handle a worker's report of an unknown reservation. It may have received that one in place of a
        stored one, so the stored ones of the same request are sent again: the worker refuses a reservation it
        has never seen, and the blocks are then free."""
        entries = [entry for entry in self._open.values() if entry.writer == worker]
        own = [entry.ticket for entry in entries if (entry.ticket.request, entry.ticket.attempt) == told]
        return [Send(worker, Push(ticket)) for ticket in own]

    def lose(self, worker: str) -> Iterator[Send]:
        """Close the reservations of a worker whose process has ended, both as writer and as owner. Owners
        that still run may reuse the blocks."""
        for id, entry in list(self._open.items()):
            if worker in (entry.writer, entry.owner):
                del self._open[id]
                if entry.owner != worker:
                    yield from _released(entry)


def _released(entry: OpenReservation | None) -> list[Send]:
    return [Send(entry.owner, Release(entry.ticket.id))] if entry else []
