"""An agent's socket to its head: over TCP, authenticated and encrypted by CURVE keys."""

import zmq
import zmq.asyncio

from streamserve.protocol.cluster import MAX_CLUSTER_BYTES
from streamserve.protocol.curve import Endpoint, KeyPair

QUEUED = 4096
"""Maximum number of queued messages in each direction."""
HEARTBEAT_MILLISECONDS = 500
SILENCE_MILLISECONDS = 1500
"""Silence of the head, in milliseconds, after which a new connection is made."""
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of connections that fail in the handshake."""


def connect(
    context: zmq.asyncio.Context, head: Endpoint, head_key: bytes, own: KeyPair
) -> zmq.asyncio.Socket:
    """Return a socket that connects to the head with this public key. It connects again after each loss."""
    socket = context.socket(zmq.DEALER)
    for option, value in {
        zmq.LINGER: 200,
        zmq.IMMEDIATE: 1,
        zmq.MAXMSGSIZE: MAX_CLUSTER_BYTES,
        zmq.SNDHWM: QUEUED,
        zmq.RCVHWM: QUEUED,
        zmq.CONNECT_TIMEOUT: 1000,
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
        zmq.HEARTBEAT_TIMEOUT: SILENCE_MILLISECONDS,
        zmq.IPV6: int(":" in head.host),
    }.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.CURVE_SERVERKEY, head_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.connect(head.address)
    return socket
