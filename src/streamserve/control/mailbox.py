"""Events on their way to a client that reads slowly: held up to a budget of all clients together."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from streamserve.control.events import Deliver, Refuse
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Event, PromptLogprobs, Token

EVENT_BYTES, SCORE_BYTES = 200, 120
"""What an event takes, and each log-probability in it, about."""

FAIR_BYTES = 64 << 10
"""What one client may always have waiting: it is those who leave more unread that have to go."""


@dataclass
class Undelivered:
    """The budget of all mailboxes, in bytes, and how much of it is in use."""

    limit: int = 64 << 20
    held: int = 0


class Mailbox:
    """What a client has not taken yet. Beyond the budget it is thrown away for an error, and `overflowed`."""

    def __init__(self, budget: Undelivered) -> None:
        self.overflowed = False
        self._budget = budget
        self._held = 0
        self._queue: asyncio.Queue[tuple[Deliver | Refuse, int]] = asyncio.Queue()

    def put(self, news: Deliver | Refuse) -> None:
        """Add what comes next."""
        if self.overflowed:
            return
        size = _size(news.events) if isinstance(news, Deliver) else 0
        if self._held + size > FAIR_BYTES and self._budget.held + size > self._budget.limit:
            self.clear()
            self.overflowed = True
            error = RequestError("the reply was left unread for too long", status=503, retry_after=1.0)
            news, size = Refuse(news.request, error), 0
        self._count(size)
        self._queue.put_nowait((news, size))

    async def get(self) -> Deliver | Refuse:
        """What comes next, once it is there."""
        news, size = await self._queue.get()
        self._count(-size)
        return news

    def empty(self) -> bool:
        """Whether nothing waits."""
        return self._queue.empty()

    def clear(self) -> None:
        """Throw away what waits."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._count(-self._held)

    def _count(self, size: int) -> None:
        self._held += size
        self._budget.held += size


def _size(events: Iterable[Event]) -> int:
    scores = 0
    count = 0
    for event in events:
        count += 1
        if isinstance(event, Token):
            scores += len(event.top or ())
        elif isinstance(event, PromptLogprobs):
            scores += sum(1 + len(entry.top) for entry in event.entries)
    return count * EVENT_BYTES + scores * SCORE_BYTES
