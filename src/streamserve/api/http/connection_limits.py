"""Limits on connections, in total and per address. Connections also count as file descriptors
(descriptors.py)."""

import logging
from collections import Counter
from dataclasses import dataclass

from streamserve.api.http.descriptors import RETRY_AFTER, Descriptors
from streamserve.protocol.errors import RequestError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on concurrent connections: `total`, and `per_address`."""

    total: int = 4096
    per_address: int = 2048

    def within(self, descriptors: int) -> "ConnectionLimits":
        """Return these limits, reduced to `descriptors`, the number of file descriptors for clients."""
        total = min(self.total, descriptors)
        return ConnectionLimits(total, min(self.per_address, total))


def address(client: tuple[str, int] | None) -> str:
    """Return the address under which a client's connections are counted; "" if it is unknown."""
    return client[0] if client else ""


class Connections:
    """Counts the open connections by address. Each connection takes one of `descriptors`."""

    def __init__(self, limits: ConnectionLimits, descriptors: Descriptors) -> None:
        self.limits = limits.within(descriptors.limit)
        self._descriptors = descriptors
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
        if not self._descriptors.acquire():
            return _refusal(
                "this server's process has reached its limit of open connections and files (ulimit -n)", 503
            )
        self.open += 1
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        """Remove an ended connection from the count."""
        self._descriptors.give()
        self.open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def _refusal(message: str, status: int) -> RequestError:
    _log.warning("a connection was refused: too many connections are open")
    return RequestError(message, status=status, retry_after=RETRY_AFTER)
