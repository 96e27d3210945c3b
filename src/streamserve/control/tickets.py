"""The fleet's book of open tickets: who may write where, until it is known that they write no more."""

from collections.abc import Iterator
from dataclasses import dataclass

from streamserve.protocol.tickets import Ticket


@dataclass(frozen=True)
class OpenTicket:
    """The worker `writer` may write into blocks of the worker `owner`."""

    ticket: Ticket
    writer: str
    owner: str


class TicketBook:
    """All tickets that somebody may write to."""

    def __init__(self) -> None:
        self._open: dict[str, OpenTicket] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, entry: OpenTicket) -> None:
        self._open[entry.ticket.id] = entry

    def close(self, id: str) -> OpenTicket | None:
        """Take a ticket out; None if it is not open."""
        return self._open.pop(id, None)

    def lose(self, worker: str) -> Iterator[OpenTicket]:
        """A worker's process has ended: its tickets are closed, as writer and as owner. Yields those whose
        owner lives on and may use the blocks again."""
        for id, entry in list(self._open.items()):
            if worker in (entry.writer, entry.owner):
                del self._open[id]
                if entry.owner != worker:
                    yield entry
