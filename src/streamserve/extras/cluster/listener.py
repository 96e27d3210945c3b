"""The head's socket for agents: a ROUTER over TCP, only for holders of allowed CURVE keys.

Without an allowed key, a connection fails in the handshake, and none of its messages reaches the head.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from streamserve.protocol.cluster import MAX_CLUSTER_BYTES
from streamserve.protocol.curve import KeyPair, parse_endpoint
from streamserve.system.throttle import Throttle

logger = logging.getLogger(__name__)

QUEUED = 4096
"""Maximum number of queued messages of one connection in each direction. Above it, TCP flow control holds the
agent back; messages to the agent are dropped, and its session sends them again."""
HANDSHAKE_MILLISECONDS = 5000
HEARTBEAT_MILLISECONDS = 500
BACKLOG = 64
LOG_SECONDS = 10.0
LOGGED_APART = 16
"""Each kind of refusal is logged at most once in LOG_SECONDS. Up to LOGGED_APART different keys or texts
count as separate kinds."""
LOGGERS = (__name__, "streamserve.extras.cluster.registry")
"""Loggers of refusals, which peers can cause at any rate."""
FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a connection was closed during its handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a connection did not speak the protocol, or has no key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "a connection used a key that is not allowed",
}


@dataclass(frozen=True)
class ClusterMessage:
    """A message of the connection `peer`, whose `key` is allowed. `data` is None unless the message has
    exactly one part."""

    peer: bytes
    key: str
    data: memoryview | None


class ClusterListener:
    """Listens at `endpoint` with the key `pair`, for clients with an `allowed` key (by its hexadecimal
    digits). A connection is dropped after `silence` seconds without a message."""

    def __init__(self, endpoint: str, pair: KeyPair, allowed: Mapping[str, str], silence: float) -> None:
        """Open the socket. Raises OSError if the address cannot be used."""
        self.handshakes_failed = 0
        self._throttle = Throttle(seconds=LOG_SECONDS, apart=LOGGED_APART)
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._throttle)
        self._allowed = allowed
        self._context = zmq.asyncio.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)
        self.socket = self._context.socket(zmq.ROUTER)
        for option, value in {
            zmq.LINGER: 200,
            zmq.MAXMSGSIZE: MAX_CLUSTER_BYTES,
            zmq.RCVHWM: QUEUED,
            zmq.SNDHWM: QUEUED,
            zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
            zmq.HEARTBEAT_TIMEOUT: max(1000, int(1000 * silence)),
            zmq.IPV6: int(":" in parse_endpoint(endpoint).host),
            zmq.CURVE_SERVER: 1,
        }.items():
            self.socket.setsockopt(option, value)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        self._monitor: Any = self.socket.get_monitor_socket(sum(FAILURES))
        try:
            self.socket.bind(_bindable(endpoint))
        except zmq.ZMQError as error:
            self.close()
            reason = zmq.strerror(error.errno or 0)  # the error's text would repeat the address
            raise OSError(f"cannot listen at {endpoint}: {reason}") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key (in Z85) may connect. Called by the authenticator."""
        digits = z85.decode(key).hex()
        if digits not in self._allowed:
            logger.warning("refused a connection: its key %s… is not allowed", digits[:8])
        return digits in self._allowed

    async def receive(self) -> ClusterMessage:
        while True:
            peer, *parts = await self.socket.recv_multipart(copy=False)
            try:
                key = z85.decode(str(parts[0].get("User-Id"))).hex() if parts else ""
            except (zmq.ZMQError, ValueError):
                continue  # impossible, as the socket requires keys: no authenticated connection
            return ClusterMessage(peer.bytes, key, parts[0].buffer if len(parts) == 1 else None)

    async def send(self, peer: bytes, data: bytes) -> None:
        """Send a message to a peer. It is dropped if the peer is gone or does not read."""
        try:
            await self.socket.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("dropped a message: %s", error)

    async def log_failures(self) -> None:
        """Count and log connections that fail in their handshakes. Runs until cancelled."""
        while True:
            event = await recv_monitor_message(self._monitor)
            self.handshakes_failed += 1
            logger.warning("refused a connection: %s", FAILURES.get(event["event"], "it failed"))

    def close(self) -> None:
        """Close the socket and end the authentication."""
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._throttle)
        self._authenticator.stop()
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()


def _bindable(endpoint: str) -> str:
    parsed = parse_endpoint(endpoint)
    return parsed.address if parsed.port else f"tcp://{parsed.host}:*"
