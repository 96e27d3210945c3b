"""A target's connection to one draft service, made again after each loss.

With keys it is a DEALER socket of libzmq with CURVE. Without keys, on loopback, it speaks the same protocol
over a plain TCP connection and bounds unfinished messages: any process of this machine may have taken the
address.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Protocol

import zmq

from streamserve.protocol.curve import Endpoint, KeyPair
from streamserve.protocol.drafting import MAX_REPLY_BYTES
from streamserve.workers.plain_connection import HANDSHAKE_SECONDS, PlainConnection
from streamserve.workers.zmtp import FrameReader, ProtocolError, frame

HEARTBEAT_MILLISECONDS = 2000
QUEUED_IN, QUEUED_OUT = 32, 64
"""Maximum number of received and of unsent messages of a link with keys. At these limits, TCP flow control
holds the service back, and sending fails."""
RECONNECT_SECONDS, RECONNECT_MAX_SECONDS = 0.05, 1.0
"""Pause before the first attempt to reconnect, and the longest pause; each pause is twice the previous
one."""
MAX_CHUNKS = 40
"""Maximum number of chunks that one call reads from a service, so that the target's other work is not
delayed."""


class DraftLink(Protocol):
    """A connection to a draft service. The owner waits for `pollable` and calls `receive` at least twice a
    second."""

    @property
    def pollable(self) -> "zmq.Socket[bytes] | int":
        """The socket or file descriptor that becomes readable when a message arrives."""

    @property
    def pending(self) -> bool:
        """Whether there may be messages that have arrived although `pollable` is not readable."""

    def receive(self) -> Iterator[bytes | memoryview]:
        """Yield the messages that have arrived. Raises ProtocolError if the service breaks the protocol; the
        connection is closed then."""

    def send(self, data: bytes) -> bool:
        """Send a message; return False if the service is not connected or does not read."""

    def close(self, linger: int = 0) -> None:
        """Close the connection, after sending queued messages for at most `linger` milliseconds."""


def open_link(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, own: KeyPair | None, wait: float = 0.0
) -> DraftLink:
    """Return the link to the service at `endpoint`; `own` is the key pair of this target. Wait up to `wait`
    seconds for a handshake without keys. Raises OSError if the process has no descriptor left."""
    if endpoint.server_key is None:
        return PlainLink(endpoint, wait)
    assert own is not None, "the settings require a key for an endpoint with a key"
    return KeyedLink(context, endpoint, endpoint.server_key, own)


class KeyedLink:
    """A DEALER socket of libzmq with CURVE keys."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, server_key: bytes, own: KeyPair
    ) -> None:
        self.pollable = context.socket(zmq.DEALER)
        for option, value in {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.SNDHWM: QUEUED_OUT,
            zmq.RCVHWM: QUEUED_IN,
            zmq.MAXMSGSIZE: MAX_REPLY_BYTES,
            zmq.RECONNECT_IVL: int(1000 * RECONNECT_SECONDS),
            zmq.RECONNECT_IVL_MAX: int(1000 * RECONNECT_MAX_SECONDS),
            zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
            zmq.IPV6: int(":" in endpoint.host),
        }.items():
            self.pollable.setsockopt(option, value)
        self.pollable.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        self.pollable.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        self.pollable.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        self.pollable.connect(endpoint.address)

    @property
    def pending(self) -> bool:
        return False  # libzmq keeps the socket readable

    def receive(self) -> Iterator[bytes | memoryview]:
        with contextlib.suppress(zmq.Again):
            while True:
                yield self.pollable.recv(zmq.NOBLOCK, copy=False).buffer

    def send(self, data: bytes) -> bool:
        try:
            self.pollable.send(data, zmq.NOBLOCK)
        except zmq.ZMQError:  # not connected, or the send queue is full
            return False
        return True

    def close(self, linger: int = 0) -> None:
        self.pollable.close(linger=linger)


class PlainLink:
    """A TCP connection to a service of this machine, without keys. `wait`: seconds that the constructor waits
    for the first handshake, so that a service that runs is used from the first request."""

    def __init__(self, endpoint: Endpoint, wait: float = 0.0) -> None:
        host = endpoint.host.strip("[]")
        self._address = (host, endpoint.port)
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._selector = selectors.DefaultSelector()
        self.pollable = self._selector.fileno()
        self._connection: PlainConnection | None = None
        self._connect_at, self._pause = 0.0, RECONNECT_SECONDS
        self._shake_until = 0.0
        """When the connection is closed if its handshake is not complete."""
        self.pending = False
        deadline = time.monotonic() + wait
        self._connect(time.monotonic())
        with contextlib.suppress(ProtocolError):
            while self._connection and not self._shaken and (left := deadline - time.monotonic()) > 0:
                next(self._messages(wait=left), None)  # it sends nothing before it has received a Hello

    @property
    def _shaken(self) -> bool:
        return self._connection is not None and self._connection.reader.shaken

    def receive(self) -> Iterator[bytes | memoryview]:
        yield from self._messages(wait=0.0)

    def _messages(self, wait: float) -> Iterator[bytes]:
        """Connect if it is time, and yield the messages that arrive; wait up to `wait` seconds for the first
        byte."""
        self._connect(now := time.monotonic())
        self.pending = True
        for _ in range(MAX_CHUNKS):
            if (connection := self._connection) is None:
                break
            try:
                yield from connection.reader.messages()
            except ProtocolError:
                self._drop()
                raise
            if connection.reader.shaken:
                self._pause = RECONNECT_SECONDS
            elif now >= self._shake_until:
                self._drop()
                break
            if not self._selector.select(wait):
                break
            wait = 0.0
            if not connection.read():
                self._drop()
                break
            self._flush(connection)
        else:
            return  # the last chunk may hold messages
        self.pending = False  # not reached either when the caller takes only some of the messages

    def send(self, data: bytes) -> bool:
        connection = self._connection
        if connection is None or not self._shaken or not connection.queue(frame(data)):
            return False
        self._flush(connection)
        return True

    def close(self, linger: int = 0) -> None:
        if self._connection is not None:
            deadline = time.monotonic() + linger / 1000
            self._selector.modify(self._connection.socket, selectors.EVENT_WRITE)
            with contextlib.suppress(OSError):
                while self._connection.flush() and time.monotonic() < deadline:
                    self._selector.select(max(0.0, deadline - time.monotonic()))
            self._drop()
        self._selector.close()

    def _connect(self, now: float) -> None:
        """Begin to connect, if it is time."""
        if self._connection is not None or now < self._connect_at:
            return
        self._connect_at = now + self._pause
        self._pause = min(2 * self._pause, RECONNECT_MAX_SECONDS)
        self._shake_until = now + HANDSHAKE_SECONDS
        try:
            stream = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: try again later
            return
        stream.setblocking(False)
        try:
            stream.connect(self._address)
        except BlockingIOError:
            pass
        except OSError:
            stream.close()
            return
        self._connection = PlainConnection(stream, FrameReader(MAX_REPLY_BYTES, b"DEALER"))
        # Writable once it is connected: the greeting is sent then.
        self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _flush(self, connection: PlainConnection) -> None:
        """Send queued bytes; the rest follows when the socket accepts more."""
        try:
            left = connection.flush()
        except OSError:
            self._drop()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
        self._selector.modify(connection.socket, events)

    def _drop(self) -> None:
        """Close the connection; another one is made after a pause."""
        if self._connection is not None:
            self._selector.unregister(self._connection.socket)
            self._connection.socket.close()
            self._connection = None
            self._connect_at = time.monotonic() + self._pause
