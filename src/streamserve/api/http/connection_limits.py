"""Limits on connections, in total and per address, below the process's file descriptor limit."""

import logging
import resource
from collections import Counter
from dataclasses import dataclass

from streamserve.protocol.errors import RequestError

_log = logging.getLogger(__name__)

RESERVED_DESCRIPTORS = 96
"""File descriptors reserved for workers, logs and files; at most half of all."""

RETRY_AFTER = 5.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on concurrent connections: `total`, and `per_address`."""

    total: int = 4096
    per_address: int = 2048

    def within(self, descriptors: int) -> "ConnectionLimits":
        """Return these limits, reduced for a process with `descriptors` file descriptors."""
        total = min(self.total, descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2))
        return ConnectionLimits(total, min(self.per_address, total))


def descriptors() -> int:
    """Return how many file descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def address(client: tuple[str, int] | None) -> str:
    """Return the address that a client's connections are counted under; empty if it is unknown."""
    return client[0] if client else ""


class Connections:
    """Counts the open connections by address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open = 0
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> RequestError | None:
        """Count a connection from `address`, or return the error that refuses it."""
        if self.open >= self.limits.total:
            return _refusal(f"{self.open} connections are open, which is the limit (max_connections)", 503)
        if self._by_address[address] >= self.limits.per_address:
            return _refusal(
                f"{self.limits.per_address} connections are open from this address, which is the limit "
                "(max_connections_per_address)",
                429,
            )
        self.open += 1
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Remove an ended connection from the count."""
        self.open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def _refusal(message: str, status: int) -> RequestError:
    _log.warning("a connection was refused: too many are open")
    return RequestError(message, status=status, retry_after=RETRY_AFTER)
