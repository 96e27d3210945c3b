"""Per-client event queues for slow readers, limited by a memory budget over all clients."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamserve.fleet.events import Deliver, Refuse
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Event, Pooled, PromptLogprobs, Token

EVENT_BYTES, LOGPROB_BYTES = 200, 120
"""Approximate bytes of an event, and of each log-probability in it."""

FAIR_BYTES = 64 << 10
"""Bytes that each client may have queued. Above the budget, only clients with more than this are dropped."""


@dataclass
class MailboxBudget:
    """The budget of all mailboxes, in bytes, and the bytes in use."""

    limit: int = 64 << 20
    used: int = 0


class Mailboxes:
    """The mailboxes of all clients that have an open request, by the request's id."""

    def __init__(self) -> None:
        self._budget = MailboxBudget()
        self._open: dict[str, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: str) -> bool:
        return request in self._open

    @contextlib.contextmanager
    def open(self, request: str) -> Iterator["Mailbox"]:
        """Open the mailbox of a request; discard it at the end of the block."""
        mailbox = self._open[request] = Mailbox(self._budget)
        try:
            yield mailbox
        finally:
            del self._open[request]
            mailbox.clear()

    def put(self, message: Deliver | Refuse) -> None:
        """Append events to a request's mailbox, if it is open."""
        if message.request in self._open:
            self._open[message.request].put(message)

    def refuse_all(self, error: RequestError) -> None:
        """Tell all clients that their requests cannot be served any more."""
        for name in list(self._open):
            self.put(Refuse(name, error))


class Mailbox:
    """The events that a client has not read yet. Above the budget they are replaced by an error, and
    `overflowed` is set. Only one task at a time may read."""

    def __init__(self, budget: MailboxBudget) -> None:
        self.overflowed = False
        self._budget = budget
        self._used = 0
        self._waiting: deque[tuple[Deliver | Refuse, int]] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: Deliver | Refuse) -> None:
        """Append the next events."""
        if self.overflowed:
            return
        size = _size(message.events) if isinstance(message, Deliver) else 0
        if self._used + size > FAIR_BYTES and self._budget.used + size > self._budget.limit:
            self.clear()
            self.overflowed = True
            error = RequestError(
                "the client did not read its events, and the server's buffer is full",
                status=503,
                retry_after=1.0,
            )
            message, size = Refuse(message.request, error), 0
        self._count(size)
        self._waiting.append((message, size))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Deliver | Refuse:
        """Return the next events; wait until there are some."""
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message, size = self._waiting.popleft()
        self._count(-size)
        return message

    def empty(self) -> bool:
        return not self._waiting

    def clear(self) -> None:
        """Discard the queued events."""
        self._waiting.clear()
        self._count(-self._used)

    def _count(self, size: int) -> None:
        self._used += size
        self._budget.used += size


def _size(events: Sequence[Event]) -> int:
    scores = 0
    for event in events:
        if isinstance(event, Token):
            scores += len(event.top) if event.top else 0
        elif isinstance(event, PromptLogprobs):
            scores += sum(1 + len(entry.top) for entry in event.entries)
    vectors = sum(len(event.vector) for event in events if isinstance(event, Pooled))
    return len(events) * EVENT_BYTES + scores * LOGPROB_BYTES + vectors
