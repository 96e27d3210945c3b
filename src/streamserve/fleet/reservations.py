"""The fleet's book of open tickets: who may write where, until it is known that they write no more.

Reserved  ──▶  TicketBook  ──▶  Push to the writer, or Release where nobody wants it any more
Pushed                          Join to the owner, or Release where its KV is missing
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streamserve.fleet.events import Send
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.messages import Pushed, Reserved
from streamserve.protocol.tickets import Join, Push, Release, Ticket


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

    def reserved(self, owner: str, news: Reserved, request: OpenRequest | None) -> list[Send]:
        """Blocks are held for a ticket: its writer may use it, if anybody still wants it. One that is open
        already is not given out, or back, again."""
        ticket = news.ticket
        wanted = request is not None and request.attempt == news.attempt and request.decode == owner
        own = (ticket.request, ticket.attempt) == (news.request, news.attempt)
        if ticket.id in self._open:
            return []
        if request is None or not wanted or not own or request.worker is None:
            return [Send(owner, Release(ticket.id))]
        self._open[ticket.id] = OpenTicket(ticket, request.worker, owner)
        return [Send(request.worker, Push(ticket))]

    def pushed(
        self, worker: str, news: Pushed, requests: Mapping[str, OpenRequest]
    ) -> tuple[list[Send], OpenRequest | None]:
        """Nobody writes to a ticket any more: its choices decode there, unless their KV is missing. Returns
        what to send, and the request that has to start over, if one has. What the book says of a ticket
        counts, whatever the news does; and only its writer can tell that it writes no more."""
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
        """A worker told of a ticket that is not in the book. Perhaps that came to it in place of one that is:
        who has never seen a ticket refuses it when it comes again, and then its blocks are free."""
        entries = [entry for entry in self._open.values() if entry.writer == worker]
        own = [entry.ticket for entry in entries if (entry.ticket.request, entry.ticket.attempt) == told]
        return [Send(worker, Push(ticket)) for ticket in own]

    def lose(self, worker: str) -> Iterator[Send]:
        """A worker's process has ended: its tickets are closed, as writer and as owner. Those whose owner
        lives on may use the blocks again."""
        for id, entry in list(self._open.items()):
            if worker in (entry.writer, entry.owner):
                del self._open[id]
                if entry.owner != worker:
                    yield from _released(entry)


def _released(entry: OpenTicket | None) -> list[Send]:
    return [Send(entry.owner, Release(entry.ticket.id))] if entry else []
