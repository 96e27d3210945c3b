"""The listener of a draft service without keys: TCP connections of this machine, read by zmtp.py.

                 ┌ ConnectedTarget ─ received bytes: at most a message and a chunk
accept ─▶ epoll ─┤                   unsent answers: at most MAX_UNSENT
                 └ ConnectedTarget … all together hold at most MAX_HELD_BYTES of received bytes

A connection whose next message is complete is not read further until `receive` has returned that message, so
TCP flow control holds its target back.
"""

import errno
import os
import resource
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
"""Maximum number of received but unprocessed bytes of all connections together. Above it, the connection
whose message is unfinished for longest is closed."""
MESSAGE_SECONDS = 10.0
"""Time from the first byte of a message after which its connection is closed if the message is not
complete."""
SWEEP_SECONDS = 1.0
MAX_CONNECTIONS = 1024
"""Maximum number of open connections. To accept another one, a silent connection is closed."""
BACKLOG = 1024
"""Maximum number of connections that wait to be accepted. The kernel may allow fewer."""
ACCEPTED_AT_ONCE = 32
ACCEPT_PAUSE_SECONDS = 0.1
"""Time without new connections after the process ran out of file descriptors."""
NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class ConnectedTarget(PlainConnection):
    """The connection of a target, or of another process that connected to the address."""

    def __init__(self, stream: socket.socket, peer: bytes, now: float) -> None:
        super().__init__(stream, FrameReader(CLOSE_BYTES))
        self.peer = peer
        self.held = 0
        """Bytes that the reader held when the listener last counted them."""
        self.heard_at = now
        """When the last message was complete; before the first message, when the connection was accepted."""
        self.spoke = False
        """Whether the peer has sent a message."""
        self.unfinished_since: float | None = now
        """Since when the handshake or a message is unfinished; None if nothing is unfinished."""


class PlainListener:
    """Listens at `endpoint`, a loopback address, with at most `max_connections`, and at most half of the
    process's file descriptors. Raises OSError if the address cannot be used."""

    def __init__(self, endpoint: Endpoint, max_connections: int = MAX_CONNECTIONS) -> None:
        host = endpoint.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, endpoint.port), family=family, backlog=BACKLOG)
        except OSError as error:
            # The text of an address in use repeats the address.
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise OSError(f"cannot listen at {endpoint.address}: {reason}") from error
        self._listening.setblocking(False)
        self.address = f"tcp://{endpoint.host}:{self._listening.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self.pollable: Sequence[int] = (self._selector.fileno(),)
        self._connections: dict[bytes, ConnectedTarget] = {}
        self._unread: deque[ConnectedTarget] = deque()
        """Connections that may have a complete message."""
        self._ended: deque[Failure | Disconnected] = deque()
        self._accepted = 0
        self._held = 0
        """Bytes that all readers hold."""
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._accept_at: float | None = None
        """When to accept connections again; None while they are accepted."""
        self._sweep_at = 0.0
        self._max_connections = min(max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    @property
    def pending(self) -> bool:
        return bool(self._unread or self._ended)

    def receive(self) -> Iterator[ReceivedMessage]:
        now = time.monotonic()
        self._read_ready(now)
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self._unread:
                break
            connection = self._unread.popleft()
            body = self._next_message(connection, now)
            if body is not None:
                self._unread.append(connection)  # after the others: each connection gets its turn
                yield ReceivedMessage(connection.peer, len(body), data=body)
        # Only now: after a pause of this thread, what had arrived in time has been read.
        self._close_late(now)

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
        """Accept connections, send unsent bytes, and read a chunk of each readable connection."""
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
                if len(self._connections) >= self._max_connections:
                    # One that never sent a message, if there is one; of these, the one silent for longest.
                    silent = min(self._connections.values(), key=lambda each: (each.spoke, each.heard_at))
                    self._fail(silent, "a silent connection was closed for a new one")
                self._accepted += 1
                connection = ConnectedTarget(stream, self._accepted.to_bytes(8, "big"), now)
                self._selector.register(stream, selectors.EVENT_READ, connection)
                self._connections[connection.peer] = connection
                self._flush(connection)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in NO_FILES:
                self._selector.unregister(self._listening)
                self._accept_at = now + ACCEPT_PAUSE_SECONDS

    def _close_late(self, now: float) -> None:
        """Every second, close the connections whose handshake or message is unfinished for too long."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_SECONDS
        for connection in self._unfinished():
            seconds = MESSAGE_SECONDS if connection.reader.shaken else HANDSHAKE_SECONDS
            if now - (connection.unfinished_since or now) >= seconds:
                what = "a message" if connection.reader.shaken else "its handshake"
                self._fail(connection, f"a connection did not finish {what} in time")

    def _unfinished(self) -> list[ConnectedTarget]:
        """Return connections with an unfinished handshake or message, and without a complete message."""
        unread = {connection.peer for connection in self._unread}
        return [
            each
            for each in self._connections.values()
            if each.unfinished_since is not None and each.peer not in unread
        ]

    def _read(self, connection: ConnectedTarget) -> None:
        if connection.peer not in self._connections:  # closed by the lines before, in the same round
            return
        if not connection.read():
            self._drop(connection)
            return
        self._count(connection)
        self._unread.append(connection)
        if self._held > MAX_HELD_BYTES and (unfinished := self._unfinished()):
            oldest = min(unfinished, key=lambda each: each.unfinished_since or 0.0)
            self._fail(oldest, "a connection held part of an unfinished message for too long")

    def _next_message(self, connection: ConnectedTarget, now: float) -> bytes | None:
        """Take the next complete message of a connection, if there is one."""
        if connection.peer not in self._connections:
            return None
        try:
            body = next(connection.reader.messages(), None)
        except ProtocolError as error:
            self._fail(connection, f"a connection violated the protocol: {error}")
            return None
        self._count(connection)
        if body is not None:
            connection.spoke = True
            connection.heard_at = now
        if connection.reader.shaken:
            begun = connection.unfinished_since if body is None else None
            connection.unfinished_since = (begun or now) if connection.held else None
        self._flush(connection)
        return body

    def _count(self, connection: ConnectedTarget) -> None:
        held = connection.reader.held
        self._held += held - connection.held
        connection.held = held

    def _flush(self, connection: ConnectedTarget) -> None:
        """Send queued bytes; the rest follows when the socket accepts more."""
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
        """Close a connection and discard its data."""
        del self._connections[connection.peer]
        self._held -= connection.held
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.reader.shaken:
            self._ended.append(Disconnected(connection.peer))
