"""Whether and with which keys workers send KV over TCP."""

import zmq
from zmq.utils import z85

from streamserve.protocol.curve import KeyPair
from streamserve.protocol.kv_network import KVNetwork
from streamserve.settings.server_config import ServerConfig


def kv_network(server: ServerConfig) -> KVNetwork | None:
    """Return how workers send KV over TCP, with a new key; None if they do not. Agents set their
    addresses."""
    transport = server.kv_transport
    if transport != "tcp" and not (transport == "auto" and server.launcher != "local"):
        return None
    pair = new_pair()
    return KVNetwork("127.0.0.1", pair.public, pair.secret, always=transport == "tcp")


def new_pair() -> KeyPair:
    """Return a new key pair."""
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KeyPair(public, secret)
