"""Launchers by name: a composition root, the only file of this package that imports optional parts."""

from collections.abc import Callable
from functools import partial

from streamserve.extras.cluster.launchers import join_launcher, ray_launcher
from streamserve.fleet.launcher import MakeLauncher
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.fleet.worker_process import may_use_gpu
from streamserve.protocol.config import ModelConfig
from streamserve.settings.server_config import ServerConfig


def local_launcher(server: ServerConfig, model: ModelConfig) -> MakeLauncher:
    """Return a function that creates the launcher of workers on this machine."""
    return partial(LocalLauncher, fork=server.fork_workers and not may_use_gpu(model.device))


LAUNCHERS: dict[str, Callable[[ServerConfig, ModelConfig], MakeLauncher]] = {
    "local": local_launcher,
    "join": join_launcher,
    "ray": ray_launcher,
}


def make_launcher(server: ServerConfig, model: ModelConfig) -> MakeLauncher:
    """Return a function that creates the launcher of a server of this model."""
    return LAUNCHERS[server.launcher](server, model)
