"""The listener of a draft service without keys: TCP connections of this machine, read by zmtp.py.

                 ┌ Client ─ received bytes: at most a message and a chunk
accept ─▶ epoll ─┤          unsent answers: at most MAX_UNSENT
                 └ Client … all clients together hold at most MAX_HELD_BYTES of received bytes

A connection whose next message is complete is not read further until `receive` has returned that message, so
TCP flow control holds its client back.
"""

import errno
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence

from streamserve.protocol.curve import Endpoint
from streamserve.workers.draft_listener import (
    CLOSE_BYTES,
    MAX_MESSAGES_AT_ONCE,
    Disconnected,
    Failure,
    ReceivedMessage,
)
from streamserve.workers.plain_connection import HANDSHAKE_SECONDS, PlainConnection
from streamserve.workers.zmtp import FrameReader, ProtocolError, frame

MAX_HELD_BYTES = 64 << 20
"""Received bytes of unfinished messages, of all connections. Beyond it the connection with most is closed."""
BACKLOG = 1024
"""Connections that wait to be accepted. The kernel may allow fewer."""
ACCEPTED_AT_ONCE = 128
ACCEPT_PAUSE_SECONDS = 0.1
"""Time without new connections after the process ran out of file descriptors."""
NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class ConnectedTarget(PlainConnection):
    """The connection of a client."""

    def __init__(self, stream: socket.socket, peer: bytes) -> None:
        super().__init__(stream, FrameReader(CLOSE_BYTES))
        self.peer = peer
        self.held = 0
        """Bytes that the reader held when the listener last counted them."""


class PlainListener:
    """Listens at `endpoint`, a loopback address. Raises OSError if the address cannot be used."""

    def __init__(self, endpoint: Endpoint) -> None:
        host = endpoint.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, endpoint.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {endpoint.address}: {error.strerror}") from error
        self._listening.setblocking(False)
        self.address = f"tcp://{endpoint.host}:{self._listening.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self.pollable: Sequence[int] = (self._selector.fileno(),)
        self._connections: dict[bytes, ConnectedTarget] = {}
        self._handshakes: deque[tuple[float, bytes]] = deque()
        """When each new client must have shaken hands, the oldest first."""
        self._unread: deque[ConnectedTarget] = deque()
        """Connections that may have a complete message."""
        self._ended: deque[Failure | Disconnected] = deque()
        self._accepted = 0
        self._held = 0
        """Bytes that all readers hold."""
        self._accept_at: float | None = 0.0
        """When to accept connections again; None while they are accepted."""

    @property
    def pending(self) -> bool:
        return bool(self._unread or self._ended)

    def receive(self) -> Iterator[ReceivedMessage]:
        now = time.monotonic()
        self._close_late(now)
        self._read_ready(now)
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self._unread:
                return
            connection = self._unread.popleft()
            body = self._next_message(connection)
            if body is not None:
                self._unread.append(connection)  # after the others: each connection gets its turn
                yield ReceivedMessage(connection.peer, len(body), data=body)

    def ended(self) -> Iterator[Failure | Disconnected]:
        for _ in range(min(len(self._ended), MAX_MESSAGES_AT_ONCE)):
            yield self._ended.popleft()

    def send(self, peer: bytes, data: bytes) -> None:
        if connection := self._connections.get(peer):
            connection.queue(frame(data))
            self._flush(connection)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listening.close()

    def _read_ready(self, now: float) -> None:
        """Accept connections, send what was left over, and read a chunk of each readable connection."""
        if self._accept_at is not None and now >= self._accept_at:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._accept_at = None
        unread = {connection.peer for connection in self._unread}
        for key, events in self._selector.select(0):
            connection: ConnectedTarget | None = key.data
            if connection is None:
                self._accept(now)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection.peer not in unread:
                self._read(connection)

    def _accept(self, now: float) -> None:
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                stream, _ = self._listening.accept()
                stream.setblocking(False)
                self._accepted += 1
                peer = self._accepted.to_bytes(8, "big")
                connection = ConnectedTarget(stream, peer)
                self._selector.register(stream, selectors.EVENT_READ, connection)
                self._connections[connection.peer] = connection
                self._handshakes.append((now + HANDSHAKE_SECONDS, peer))
                self._flush(connection)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in NO_FILES:
                self._selector.unregister(self._listening)
                self._accept_at = now + ACCEPT_PAUSE_SECONDS

    def _close_late(self, now: float) -> None:
        while self._handshakes and self._handshakes[0][0] <= now:
            _, peer = self._handshakes.popleft()
            connection = self._connections.get(peer)
            if connection is not None and not connection.reader.shaken:
                self._fail(connection, "a connection did not finish its handshake in time")

    def _read(self, connection: ConnectedTarget) -> None:
        if connection.peer not in self._connections:  # closed by the lines before, in the same round
            return
        if not connection.read():
            self._drop(connection)
            return
        self._count(connection)
        self._unread.append(connection)
        if self._held > MAX_HELD_BYTES:
            largest = max(self._connections.values(), key=lambda each: each.held)
            self._fail(largest, "a connection held too much of an unfinished message")

    def _next_message(self, connection: ConnectedTarget) -> bytes | None:
        """Take the next complete message of a connection, if there is one."""
        if connection.peer not in self._connections:
            return None
        try:
            body = next(connection.reader.messages(), None)
        except ProtocolError as error:
            self._fail(connection, f"a connection violated the protocol: {error}")
            return None
        self._count(connection)
        self._flush(connection)
        return body

    def _count(self, connection: ConnectedTarget) -> None:
        held = connection.reader.held
        self._held += held - connection.held
        connection.held = held

    def _flush(self, connection: ConnectedTarget) -> None:
        """Send what is queued, and wait for the socket to take more if something is left."""
        if connection.peer not in self._connections:
            return
        try:
            left = connection.flush()
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _fail(self, connection: ConnectedTarget, text: str) -> None:
        """Close a connection whose peer broke the protocol."""
        if connection.peer in self._connections:
            self._ended.append(Failure("unreadable", text))
            self._drop(connection)

    def _drop(self, connection: ConnectedTarget) -> None:
        """Close a connection and forget what it held."""
        del self._connections[connection.peer]
        self._held -= connection.held
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.reader.shaken:
            self._ended.append(Disconnected(connection.peer))
