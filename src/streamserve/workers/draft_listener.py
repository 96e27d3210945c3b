"""The listener of a draft service: takes messages of its targets, and says which connections ended.

With keys it is a ROUTER socket of libzmq with CURVE (keyed_listener.py). Without keys, on loopback, it reads
the same protocol itself (plain_listener.py): any process of this machine may connect, and libzmq would hold a
message of endless parts until memory runs out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from streamserve.protocol.drafting import MAX_MESSAGE_BYTES, Reason

CLOSE_BYTES = 2 * MAX_MESSAGE_BYTES
"""Size of a message above which the connection is closed; smaller messages that are too large are
answered."""
MAX_MESSAGES_AT_ONCE = 256
"""Maximum number of messages, or of ended connections, that one call returns."""


@dataclass(frozen=True)
class ReceivedMessage:
    """A received message of `size` bytes, not decoded yet. `fault` says why it must not be decoded; empty if
    it may be. `key` and `name` are the key and the name of an allowed client."""

    peer: bytes
    size: int
    key: str = ""
    name: str = ""
    fault: str = ""
    data: bytes | memoryview | None = None


@dataclass(frozen=True)
class Failure:
    """A connection that was closed because its peer broke the protocol or has no allowed key."""

    reason: Reason
    text: str


@dataclass(frozen=True)
class Disconnected:
    """The connection of `peer` has ended."""

    peer: bytes


class DraftListener(Protocol):
    """The listener of a draft service for its targets, used by one thread. `address` is the address at which
    it listens."""

    address: str

    @property
    def pollable(self) -> Sequence["zmq.Socket[bytes] | int"]:
        """The sockets and file descriptors to wait for."""

    @property
    def pending(self) -> bool:
        """Whether `receive` or `ended` would return something although nothing is readable."""

    def receive(self) -> Iterator[ReceivedMessage]:
        """Yield at most `MAX_MESSAGES_AT_ONCE` received messages, so that the thread's other work is not
        delayed."""

    def ended(self) -> Iterator[Failure | Disconnected]:
        """Yield connections that ended since the last call, at most `MAX_MESSAGES_AT_ONCE`."""

    def send(self, peer: bytes, data: bytes) -> None:
        """Send a message to a peer. The message is dropped if the peer is gone or does not read."""

    def close(self) -> None:
        """Close all connections."""
