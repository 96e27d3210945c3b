"""The head's socket that agents connect to: a ROUTER over TCP, for holders of allowed CURVE keys only.

Without such a key a connection gets no further than the handshake, and nothing of it reaches the head.
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
"""Queued messages of one connection in each direction. Beyond it, TCP flow control holds an agent back, and
messages to it are dropped, which its session repeats."""
HANDSHAKE_MILLISECONDS = 5000
HEARTBEAT_MILLISECONDS = 500
BACKLOG = 64
LOG_SECONDS = 10.0
LOGGED_APART = 16
"""What is refused is logged at most once in so many seconds for each reason, up to so many keys or texts
apart."""
LOGGERS = (__name__, "streamserve.cluster.registry")
"""The loggers of what is refused, which peers can cause at any rate."""
FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a connection was closed during its handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "a connection did not speak the protocol, or has no key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "a connection used a key that is not allowed",
}


@dataclass(frozen=True)
class Received:
    """A message of `peer`, a connection, whose key is allowed. `data` is None if it is not one message."""

    peer: bytes
    key: str
    data: memoryview | None


class ClusterListener:
    """Listens at `endpoint` with the key `pair`, for clients with an `allowed` key (by its hexadecimal
    digits). Connections are dropped when they have been silent for `silence` seconds."""

    def __init__(self, endpoint: str, pair: KeyPair, allowed: Mapping[str, str], silence: float) -> None:
        """Raises OSError if the address cannot be used."""
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
            reason = zmq.strerror(error.errno or 0)  # the error's own text has the address once more
            raise OSError(f"cannot listen at {endpoint}: {reason}") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key (in Z85) may connect; called by the authenticator."""
        digits = z85.decode(key).hex()
        if digits not in self._allowed:
            logger.warning("refused a connection: its key %s… is not allowed", digits[:8])
        return digits in self._allowed

    async def receive(self) -> Received:
        """Return the next message."""
        while True:
            peer, *parts = await self.socket.recv_multipart(copy=False)
            try:
                key = z85.decode(str(parts[0].get("User-Id"))).hex() if parts else ""
            except (zmq.ZMQError, ValueError):
                continue  # no authenticated connection: cannot be, as the socket requires keys
            return Received(peer.bytes, key, parts[0].buffer if len(parts) == 1 else None)

    async def send(self, peer: bytes, data: bytes) -> None:
        """Send to a peer; dropped if it is gone or does not read."""
        try:
            await self.socket.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("dropped a message: %s", error)

    async def log_failures(self) -> None:
        """Count and log the connections that fail in their handshakes, for ever."""
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
