"""Launchers of workers on other machines, for the settings; and the epoch of a head."""

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from streamserve.extras.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.fleet.launcher import MakeLauncher
from streamserve.llm.kv_network import new_pair
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import read_key_pair
from streamserve.protocol.files import read_regular_file
from streamserve.settings.cluster import allowed_keys, ray_resources
from streamserve.settings.server_config import ServerConfig

logger = logging.getLogger(__name__)

_MAX_EPOCH_BYTES = 64


def join_launcher(server: ServerConfig, model: ModelConfig) -> MakeLauncher:
    """Return a function that creates a launcher that machines join."""
    return partial(JoinLauncher, _join_config(server))


def _join_config(server: ServerConfig) -> JoinConfig:
    key = server.join_key
    return JoinConfig(
        endpoint=server.listen,
        pair=read_key_pair(key) if key else new_pair(),
        allowed=allowed_keys(server),
        lease=server.join_lease,
        epoch=next_epoch(Path(key)) if key else int(1000 * time.time()),
    )


def ray_launcher(server: ServerConfig, model: ModelConfig) -> MakeLauncher:
    """Return a function that creates a launcher by Ray. Its agents have a separate key, new at each start."""
    from streamserve.extras.cluster.ray_launcher import RayConfig, RayLauncher

    agents, join = new_pair(), _join_config(server)
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


def next_epoch(key: Path, clock: float | None = None) -> int:
    """Return the epoch of a new head, and store it next to its key file. The epoch is the present time, or
    one more than the stored epoch if that is later: so it is above all epochs stored there, and heads on
    several machines are ordered by their starts. If it cannot be stored, a warning is logged."""
    file = key.with_name(f"{key.name}.epoch")
    now = int(1000 * (time.time() if clock is None else clock))
    epoch = max(_stored_epoch(file) + 1, now)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{epoch}\n")
        temporary.replace(file)
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): the head uses its start time as its epoch", file, error.strerror
        )
    return epoch


def _stored_epoch(file: Path) -> int:
    """Return the epoch in a file; 0 if there is none."""
    try:
        return int(read_regular_file(file, _MAX_EPOCH_BYTES))
    except (OSError, ValueError):
        return 0
