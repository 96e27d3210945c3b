"""The memory that clients can make the API process hold: one budget, charged before the memory is made.

Raw bodies and WebSocket messages, what they become when they are parsed, prompts as tokens, prompt streams,
log-probabilities. What one client's request is charged is given back when the request ends.
"""

from threading import Lock
from types import TracebackType

from streamserve.protocol.errors import RequestError

SMALL = 1 << 20
"""Bytes that a request may hold and still count as small. The last quarter of the budget is for such
requests: uploads that fill the rest do not shut out a chat message."""

RETRY_AFTER = 1.0

VALUE_BYTES = 64
"""An upper bound for one parsed JSON value, in bytes, its place in a list or an object included."""

CONTAINER_BYTES = 448
"""The same for what a list or an object takes besides its values, twice: it is copied once when checked."""

TOKEN_BYTES = 44
"""A token id in a list: a pointer and an integer object."""


class MemoryAccount:
    """A budget of `limit` bytes, of which `held` are charged now. `peak` is the most there ever were. May be
    used by several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._lock = Lock()

    def charge(self) -> "Charge":
        """A new, empty charge."""
        return Charge(self)

    def take(self, size: int, before: int) -> None:
        """Charge `size` bytes more to a holder of `before`. Raises RequestError (413 if that can never fit,
        else 429 with Retry-After), and then nothing is charged."""
        whole = before + size
        if whole > self.largest:
            raise RequestError(
                f"the request needs {whole} bytes of the server's memory, and {self.largest} is the limit of "
                "one request (three quarters of max_memory_bytes)",
                status=413,
            )
        limit = self.limit if whole <= SMALL else self.largest
        with self._lock:
            if self.held + size <= limit:
                self.held += size
                self.peak = max(self.peak, self.held)
                return
        raise RequestError(
            f"the requests that are open hold {self.held} bytes, and {self.limit} is the limit of all "
            "together (max_memory_bytes)",
            status=429,
            retry_after=RETRY_AFTER,
        )

    def give(self, size: int) -> None:
        """Return `size` charged bytes."""
        with self._lock:
            self.held -= size

    @property
    def largest(self) -> int:
        """The most bytes that one holder may have."""
        return self.limit - self.limit // 4


class Charge:
    """What one holder has of an account. A context manager: everything is given back at its end."""

    def __init__(self, account: MemoryAccount) -> None:
        self._account = account
        self._open = True
        self.held = 0

    def add(self, size: int) -> None:
        """Hold `size` bytes more. Raises RequestError as MemoryAccount.take does."""
        if self._open:
            self._account.take(size, self.held)
            self.held += size

    def give(self, size: int) -> None:
        """Give `size` bytes back, at most all that is held."""
        size = min(size, self.held)
        self._account.give(size)
        self.held -= size

    def set(self, size: int) -> None:
        """Hold `size` bytes, more or fewer than now. Raises RequestError if it is more than there are."""
        if size > self.held:
            self.add(size - self.held)
        else:
            self.give(self.held - size)

    def close(self) -> None:
        """Give everything back; from here on nothing is charged."""
        self._open = False
        self.give(self.held)

    def __enter__(self) -> "Charge":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
