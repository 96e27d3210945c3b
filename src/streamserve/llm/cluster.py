"""The launcher for the settings, and the epoch of a head."""

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import zmq
from zmq.utils import z85

from streamserve.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.fleet.launcher import MakeLauncher
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.fleet.worker_process import may_use_gpu
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import KeyPair, read_key_pair
from streamserve.protocol.kv_network import KVNetwork
from streamserve.protocol.server_config import ServerConfig
from streamserve.settings.cluster import allowed_keys, ray_resources

logger = logging.getLogger(__name__)


def make_launcher(server: ServerConfig, model: ModelConfig) -> MakeLauncher:
    """Return a function that creates the launcher of a server of this model."""
    if server.launcher == "local":
        return partial(LocalLauncher, fork=server.fork_workers and not may_use_gpu(model.device))
    key = server.join_key
    join = JoinConfig(
        endpoint=server.listen,
        pair=read_key_pair(key) if key else _new_pair(),
        allowed=allowed_keys(server),
        lease=server.join_lease,
        epoch=next_epoch(Path(key)) if key else int(1000 * time.time()),
    )
    return partial(JoinLauncher, join) if server.launcher == "join" else _ray_launcher(join, server, model)


def _ray_launcher(join: JoinConfig, server: ServerConfig, model: ModelConfig) -> MakeLauncher:
    """Return a function that creates a launcher by Ray. Its agents have a separate key, new at each start."""
    from streamserve.cluster.ray_launcher import RayConfig, RayLauncher

    agents = _new_pair()
    join = replace(
        join,
        allowed={**join.allowed, agents.public.hex(): "ray"},
        offer="Ray places a worker's agent where there is space",
    )
    if server.listen == ServerConfig().listen:
        join = replace(join, endpoint="")  # empty: at the address by which Ray knows this machine
    gpus = model.tensor_parallel_size if model.device.startswith("cuda") else 0
    resources = ray_resources(server.ray_resources)
    return partial(
        RayLauncher,
        RayConfig(join, server.ray_address, model.threads, gpus, resources, agents, server.log_level),
    )


def _new_pair() -> KeyPair:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KeyPair(public, secret)


def kv_network(server: ServerConfig) -> KVNetwork | None:
    """Return how workers send KV over TCP, with a new key; None if they do not. Agents set their
    addresses."""
    transport = server.kv_transport
    if transport != "tcp" and not (transport == "auto" and server.launcher != "local"):
        return None
    pair = _new_pair()
    return KVNetwork("127.0.0.1", pair.public, pair.secret, always=transport == "tcp")


def next_epoch(key: Path, clock: float | None = None) -> int:
    """Return the epoch of a new head, and store it next to its key file. It is above all earlier epochs
    stored there, and heads on several machines are ordered by time. If it cannot be stored, it is the time
    alone."""
    file = key.with_name(f"{key.name}.epoch")
    stored = file.read_text().strip() if file.exists() else "0"
    now = int(1000 * (time.time() if clock is None else clock))
    epoch = max(int(stored) + 1 if stored.isdecimal() else 1, now)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{epoch}\n")
        temporary.replace(file)
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): the head uses its start time as its epoch", file, error.strerror
        )
    return epoch
