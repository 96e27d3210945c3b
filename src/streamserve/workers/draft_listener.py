"""The listener of a draft service: a ROUTER socket for its targets, with CURVE keys if configured."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from streamserve.protocol.curve import parse_endpoint, read_clients, read_key_pair
from streamserve.protocol.drafting import MAX_MESSAGE_BYTES
from streamserve.protocol.drafting_config import DraftingConfig

logger = logging.getLogger(__name__)

CLOSE_BYTES = 2 * MAX_MESSAGE_BYTES
"""Bytes of a message beyond which the connection is closed instead of answered."""
MAX_MESSAGES_AT_ONCE = 256
"""Messages, or ended connections, that one call returns at most."""
QUEUED_IN, QUEUED_OUT = 8, 64
"""Queued messages of one connection. Beyond it, TCP flow control holds its client back, and answers are
dropped."""
HANDSHAKE_MILLISECONDS = 5000
"""Milliseconds after which a connection that has not finished its handshake is closed."""
FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a connection was closed during its handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a connection violated the protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "a connection used a key that is not allowed",
}


@dataclass(frozen=True)
class Received:
    """A received message of `size` bytes, not copied or decoded yet. `fault` is why it must not be decoded,
    if so. `key` and `name` are those of an allowed client."""

    peer: bytes
    size: int
    key: str = ""
    name: str = ""
    fault: str = ""
    frame: zmq.Frame | None = None

    @property
    def data(self) -> bytes | None:
        """The bytes; None for a message that must not be decoded."""
        return None if self.frame is None or self.fault else self.frame.bytes


@dataclass(frozen=True)
class Failure:
    """A connection that failed in its handshake, with the reason as text."""

    text: str


@dataclass(frozen=True)
class Disconnected:
    """The connection of `peer` has ended."""

    peer: bytes


class DraftListener:
    """Listens at `config.listen`. Raises ValueError for invalid key files, ZMQError if the address is in
    use."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: DraftingConfig) -> None:
        endpoint = parse_endpoint(config.listen)
        self._names: Mapping[str, str] = {}
        self._authenticator: ThreadAuthenticator | None = None
        pair = read_key_pair(config.key) if config.key else None
        clients = read_clients(config.clients) if config.clients else {}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, CLOSE_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, QUEUED_IN)
        self.socket.setsockopt(zmq.SNDHWM, QUEUED_OUT)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        self.monitor = self.socket.get_monitor_socket(sum(FAILURES) | zmq.EVENT_DISCONNECTED)
        self.peers: dict[int, bytes] = {}
        """The peer of each connection, by file descriptor."""
        if pair:
            self._names = {key.hex(): name for key, name in clients.items()}
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", self)
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        try:
            self.socket.bind(endpoint.address.replace(":0", ":*") if not endpoint.port else endpoint.address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key (in Z85) is allowed to connect; called by the
        authenticator."""
        return z85.decode(key).hex() in self._names

    def receive(self) -> Iterator[Received]:
        """Yield at most `MAX_MESSAGES_AT_ONCE` received messages, so that the thread's other work is not
        delayed."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                peer, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield self._received(peer, parts)

    def _received(self, peer: zmq.Frame, parts: list[zmq.Frame]) -> Received:
        size = sum(len(part) for part in parts)
        if len(parts) != 1:
            return Received(peer.bytes, size, fault="a message must have exactly one part")
        try:
            # ZMTP 1 and 2 have no metadata: neither the key nor the connection of a message is known.
            self.peers[int(peer.get(zmq.SRCFD))] = peer.bytes
            key = self._key(parts[0])
        except (zmq.ZMQError, ValueError):
            return Received(peer.bytes, size, fault="ZMTP versions before 3 are not supported")
        return Received(peer.bytes, size, key, self._names.get(key, ""), frame=parts[0])

    def ended(self) -> Iterator[Failure | Disconnected]:
        """Yield connections that ended since the last call, at most `MAX_MESSAGES_AT_ONCE`."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self.monitor.poll(0):
                return
            message = recv_monitor_message(self.monitor)
            if message["event"] != zmq.EVENT_DISCONNECTED:
                yield Failure(FAILURES.get(message["event"], "a connection failed"))
            elif peer := self.peers.pop(message["value"], None):
                yield Disconnected(peer)

    def send(self, peer: bytes, data: bytes) -> None:
        """Send to a peer; dropped if it is gone or does not read."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([peer, data], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket and end its authentication."""
        if self._authenticator:
            self._authenticator.stop()
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def _key(self, part: zmq.Frame) -> str:
        """Return the sender's public key in hexadecimal, as in key files; empty without keys."""
        return z85.decode(str(part.get("User-Id"))).hex() if self._names else ""
