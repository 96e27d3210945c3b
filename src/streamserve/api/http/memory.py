"""The memory that client requests may use in the API process: one budget, charged before memory is allocated.

Covers raw bodies and WebSocket messages, their parsed form, prompts as tokens, prompt streams, and
log-probabilities. A request's charge is released when the request ends.
"""

from threading import Lock

from streamserve.protocol.errors import RequestError

SMALL = 1 << 20
"""A request up to this size, in bytes, counts as small. The last quarter of the budget is reserved for small
requests, so that uploads which fill the rest do not block a chat message."""

RETRY_AFTER = 1.0

VALUE_BYTES = 64
"""An upper bound for one parsed JSON value, in bytes, including its slot in a list or an object."""

CONTAINER_BYTES = 448
"""An upper bound for the overhead of a list or an object, in bytes, counted twice: validation copies it
once."""

TOKEN_BYTES = 44
"""Bytes of a token id in a list: a pointer and an integer object."""


class MemoryAccount:
    """A budget of `limit` bytes. `held` bytes are charged now; `peak` is the maximum so far. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._lock = Lock()

    def charge(self) -> "Charge":
        """Create an empty charge."""
        return Charge(self)

    def acquire(self, size: int, before: int) -> None:
        """Charge `size` more bytes to a holder that has `before` bytes.

        Raises RequestError, without charging anything: 413 if the sum can never fit, else 429 with
        Retry-After.
        """
        total = before + size
        if total > self.max_charge:
            raise RequestError(
                f"the request needs {total} bytes of the server's memory, and {self.max_charge} is the limit "
                "of one request (three quarters of max_memory_bytes)",
                status=413,
            )
        limit = self.limit if total <= SMALL else self.max_charge
        with self._lock:
            if self.held + size <= limit:
                self.held += size
                self.peak = max(self.peak, self.held)
                return
        raise RequestError(
            f"the open requests hold {self.held} bytes, and {self.limit} is the limit of all "
            "together (max_memory_bytes)",
            status=429,
            retry_after=RETRY_AFTER,
        )

    def release(self, size: int) -> None:
        """Release `size` charged bytes."""
        with self._lock:
            self.held -= size

    @property
    def max_charge(self) -> int:
        """The maximum number of bytes of one holder."""
        return self.limit - self.limit // 4


class Charge:
    """The bytes that one holder has charged to an account.

    A context manager that releases all of them at its end.
    """

    def __init__(self, account: MemoryAccount) -> None:
        self._account = account
        self._open = True
        self.held = 0

    def add(self, size: int) -> None:
        """Charge `size` more bytes. Raises RequestError as MemoryAccount.acquire does."""
        if self._open:
            self._account.acquire(size, self.held)
            self.held += size

    def release(self, size: int) -> None:
        """Release `size` bytes, or all if fewer are held."""
        size = min(size, self.held)
        self._account.release(size)
        self.held -= size

    def set(self, size: int) -> None:
        """Change the charge to `size` bytes. Raises RequestError if they are not available."""
        if size > self.held:
            self.add(size - self.held)
        else:
            self.release(self.held - size)

    def close(self) -> None:
        """Release all bytes; later calls charge nothing."""
        self._open = False
        self.release(self.held)

    def __enter__(self) -> "Charge":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
