"""Where a draft service's targets come in: a ROUTER socket, with keys where there are any."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from streamserve.protocol.config import DraftingConfig
from streamserve.protocol.curve import parse_endpoint, read_clients, read_key_pair
from streamserve.protocol.drafting import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

CLOSED_BEYOND = 4 * MAX_MESSAGE_BYTES
"""Bytes of a message beyond which the connection is closed instead of answered."""
MOST_AT_ONCE = 256
FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a connection was closed in its handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a connection does not speak the protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "a connection showed a key that is not allowed",
}


@dataclass(frozen=True)
class Received:
    """A message as it came; no `data` if it had more parts than one. `key` and `name` of an allowed
    client."""

    peer: bytes
    data: bytes | None
    key: str
    name: str


@dataclass(frozen=True)
class Failure:
    """A connection that ended in its handshake, in words."""

    text: str


@dataclass(frozen=True)
class Disconnected:
    """The connection by which the messages of `peer` came has ended."""

    peer: bytes


class Gate:
    """Listens at `config.listen`. Raises ValueError for key files that cannot be used, ZMQError if the
    address is taken."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: DraftingConfig) -> None:
        endpoint = parse_endpoint(config.listen)
        self._names: Mapping[str, str] = {}
        self._authenticator: ThreadAuthenticator | None = None
        pair = read_key_pair(config.key) if config.key else None
        clients = read_clients(config.clients) if config.clients else {}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, CLOSED_BEYOND)
        self.monitor = self.socket.get_monitor_socket(sum(FAILURES) | zmq.EVENT_DISCONNECTED)
        self._peers: dict[int, bytes] = {}
        """Whose messages come by a connection, by its file descriptor."""
        if pair:
            self._names = {z85.encode(key).decode(): name for key, name in clients.items()}
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
        """Whether a client with this public key (in Z85) may come in; called by the authenticator."""
        return key.decode() in self._names

    def receive(self) -> Iterator[Received]:
        """What has come, some of it: the others of this process are waiting too."""
        for _ in range(MOST_AT_ONCE):
            try:
                peer, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._peers[int(peer.get(zmq.SRCFD))] = peer.bytes
            key = self._key(parts[0]) if parts else ""
            data = parts[0].bytes if len(parts) == 1 else None
            yield Received(peer.bytes, data, key, self._names.get(key, ""))

    def ended(self) -> Iterator[Failure | Disconnected]:
        """Connections that ended since the last call."""
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            if message["event"] != zmq.EVENT_DISCONNECTED:
                yield Failure(FAILURES.get(message["event"], "a connection failed"))
            elif peer := self._peers.pop(message["value"], None):
                yield Disconnected(peer)

    def send(self, peer: bytes, data: bytes) -> None:
        """To a peer, if it is still there."""
        self.socket.send_multipart([peer, data])

    def close(self) -> None:
        if self._authenticator:
            self._authenticator.stop()
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def _key(self, part: zmq.Frame) -> str:
        if not self._names:
            return ""
        return str(part.get("User-Id"))
