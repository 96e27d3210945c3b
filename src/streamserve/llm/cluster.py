"""The launcher that the settings ask for, and the epoch of a head."""

import logging
import os
import time
from functools import partial
from pathlib import Path

import zmq
from zmq.utils import z85

from streamserve.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.fleet.launcher import MakeLauncher
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.protocol.curve import read_key_pair
from streamserve.protocol.kv_network import KVNetwork
from streamserve.protocol.server_config import ServerConfig
from streamserve.settings.cluster import allowed_keys

logger = logging.getLogger(__name__)


def make_launcher(server: ServerConfig) -> MakeLauncher:
    """Return what makes the launcher of a server."""
    if server.launcher == "local":
        return LocalLauncher
    assert server.join_key, "settings see to that"
    return partial(
        JoinLauncher,
        JoinConfig(
            endpoint=server.listen,
            pair=read_key_pair(server.join_key),
            allowed=allowed_keys(server),
            lease=server.join_lease,
            epoch=next_epoch(Path(server.join_key)),
        ),
    )


def kv_network(server: ServerConfig) -> KVNetwork | None:
    """Return how workers send KV over TCP, with a new key; None if they do not. Agents set their
    addresses."""
    transport = server.kv_transport
    if transport != "tcp" and not (transport == "auto" and server.launcher == "join"):
        return None
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KVNetwork("127.0.0.1", public, secret, always=transport == "tcp")


def next_epoch(key: Path, clock: float | None = None) -> int:
    """Return the epoch of a new head, and store it next to its key file: above all earlier ones there, and in
    the order of time among heads on several machines. Where it cannot be stored, the time alone decides."""
    file = key.with_name(f"{key.name}.epoch")
    stored = file.read_text().strip() if file.exists() else "0"
    now = int(1000 * (time.time() if clock is None else clock))
    epoch = max(int(stored) + 1 if stored.isdecimal() else 1, now)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{epoch}\n")
        temporary.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the head's epoch is its start time", file, error.strerror)
    return epoch
