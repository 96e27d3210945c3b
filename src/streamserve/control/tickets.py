"""The fleet's book of open tickets: who may write where, until it is known that they write no more.

Reserved  ──▶  TicketBook  ──▶  Push to the writer, or Release where nobody wants it any more
Pushed                          Join to the owner, or Release where its KV is missing
"""

from collections.abc import Iterator
from dataclasses import dataclass

from streamserve.control.events import Send
from streamserve.control.requests import OpenRequest
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

    def reserved(self, owner: str, news: Reserved, request: OpenRequest | None) -> Send:
        """Blocks are held for a ticket: its writer may use it, if anybody still wants it."""
        wanted = request is not None and request.attempt == news.attempt and request.decode == owner
        if request is None or not wanted or request.worker is None:
            return Send(owner, Release(news.ticket.id))
        self._open[news.ticket.id] = OpenTicket(news.ticket, request.worker, owner)
        return Send(request.worker, Push(news.ticket))

    def pushed(self, worker: str, news: Pushed, request: OpenRequest | None) -> tuple[list[Send], bool]:
        """Nobody writes to a ticket any more: its choices decode there, unless their KV is missing. Returns
        what to send, and whether the request has to start over."""
        entry = self._open.pop(news.ticket, None)
        current = request is not None and request.attempt == news.attempt
        if request is None or not current:
            return _released(entry), False
        going = request.handing & set(entry.ticket.choices) if entry else set()
        if entry and going and not news.error:
            request.handing -= going
            outputs = {choice: list(request.outputs[choice]) for choice in sorted(going)}
            began = {choice: request.began[choice] for choice in sorted(going)}
            return [Send(entry.owner, Join(news.request, news.attempt, news.ticket, outputs, began))], False
        return _released(entry), bool(going) or worker == request.decode

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
