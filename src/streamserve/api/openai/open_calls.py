"""The calls of a conversation that have no result yet."""

from collections import defaultdict, deque
from itertools import count


class OpenCalls:
    """The calls without a result, in their order. Each method takes constant time on average, because a
    conversation may have tens of thousands of calls."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = count()
        self._queues: defaultdict[str | None, deque[tuple[int, str]]] = defaultdict(deque)
        """All calls (None), and the calls of each function, each with its number. Calls with another number
        in `_numbers`, or none, have a result."""

    def add(self, call: str, function: str) -> None:
        """Add the id of a call, and the name of its function."""
        entry = self._numbers.setdefault(call, next(self._next)), call
        self._queues[None].append(entry)
        self._queues[function].append(entry)

    def close(self, call: str) -> None:
        """Remove all calls with an id: they have a result."""
        self._numbers.pop(call, None)

    def first(self, function: str | None = None) -> str | None:
        """Return the id of the first call, or of the first call of a function; None if there is none."""
        queue = self._queues[function]
        while queue and self._numbers.get(queue[0][1]) != queue[0][0]:
            queue.popleft()
        return queue[0][1] if queue else None
