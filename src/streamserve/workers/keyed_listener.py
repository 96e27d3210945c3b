"""The listener of a draft service with keys: a ROUTER socket that admits targets by their CURVE keys."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from streamserve.protocol.curve import Endpoint, KeyPair
from streamserve.workers.draft_listener import (
    CLOSE_BYTES,
    MAX_MESSAGES_AT_ONCE,
    Disconnected,
    Failure,
    ReceivedMessage,
)
from streamserve.workers.plain_connection import HANDSHAKE_SECONDS

logger = logging.getLogger(__name__)

QUEUED_IN, QUEUED_OUT = 8, 64
"""Maximum number of received and of unsent messages of one connection. At these limits, TCP flow control
holds the client back, and answers are dropped."""
FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a connection was closed during its handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a connection violated the protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "a connection used a key that is not allowed",
}


class KeyedListener:
    """Listens at `endpoint` with the key `pair`, for the `clients`: names by public key. Raises ZMQError if
    the address cannot be used."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, pair: KeyPair,
        clients: Mapping[bytes, str],
    ) -> None:  # fmt: skip
        self._names = {key.hex(): name for key, name in clients.items()}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in endpoint.host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, CLOSE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_IN)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_OUT)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_SECONDS))
        self._monitor = self._socket.get_monitor_socket(sum(FAILURES) | zmq.EVENT_DISCONNECTED)
        self.pollable: Sequence[zmq.Socket[bytes]] = (self._socket, self._monitor)
        self._peers: dict[int, bytes] = {}
        """The peer of each connection, by file descriptor."""
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        try:
            self._socket.bind(endpoint.address.replace(":0", ":*") if not endpoint.port else endpoint.address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def pending(self) -> bool:
        return False  # libzmq keeps both sockets readable

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key (in Z85) is allowed to connect; called by the
        authenticator."""
        return z85.decode(key).hex() in self._names

    def receive(self) -> Iterator[ReceivedMessage]:
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield self._received(peer, parts)

    def _received(self, peer: zmq.Frame, parts: list[zmq.Frame]) -> ReceivedMessage:
        size = sum(len(part) for part in parts)
        if len(parts) != 1:
            return ReceivedMessage(peer.bytes, size, fault="a message must have exactly one part")
        try:
            # ZMTP 1 and 2 have no metadata: neither the key nor the connection of a message is known.
            self._peers[int(peer.get(zmq.SRCFD))] = peer.bytes
            key = z85.decode(str(parts[0].get("User-Id"))).hex()
        except (zmq.ZMQError, ValueError):
            return ReceivedMessage(peer.bytes, size, fault="ZMTP versions before 3 are not supported")
        return ReceivedMessage(peer.bytes, size, key, self._names.get(key, ""), data=parts[0].buffer)

    def ended(self) -> Iterator[Failure | Disconnected]:
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self._monitor.poll(0):
                return
            message = recv_monitor_message(self._monitor)
            if message["event"] != zmq.EVENT_DISCONNECTED:
                yield Failure("key", FAILURES.get(message["event"], "a connection failed"))
            elif peer := self._peers.pop(message["value"], None):
                yield Disconnected(peer)

    def send(self, peer: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket and end its authentication."""
        self._authenticator.stop()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
