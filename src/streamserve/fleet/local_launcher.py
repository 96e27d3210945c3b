"""The launcher of child processes: workers on this machine, reached through a socket in a private folder."""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from streamserve.fleet.control_socket import ControlSocket
from streamserve.fleet.launcher import Launch, Launched, MachineState
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.worker_process import SharedWeightsMemory, prepared_fork_server
from streamserve.protocol.config import WorkerConfig


class LocalLauncher:
    """Starts `workers` with `launch`. By default, the workers share the memory of their weights. With `fork`,
    they are forked where possible. Messages go through the `control` socket."""

    def __init__(
        self, workers: Mapping[str, ProcessState[Any]], launch: Launch | None = None, fork: bool = True
    ) -> None:
        self.control = ControlSocket(workers)
        self._workers = workers
        self._made_at = time.monotonic()
        self._weights = SharedWeightsMemory()
        self._launch = launch or partial(self._weights.start_worker, fork=fork)
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(prepared_fork_server(fork and not launch))

    @property
    def endpoint(self) -> str:
        return self.control.endpoint

    async def start(self, config: WorkerConfig) -> Launched:
        return await self._launch(config)

    async def send(self, worker: str, data: bytes) -> None:
        await self.control.send(worker, data)

    async def receive(self) -> tuple[str, int, bytes]:
        return await self.control.receive()

    def machines(self) -> Sequence[MachineState]:
        now = time.monotonic()
        return [MachineState(socket.gethostname(), None, tuple(self._workers), self._made_at, now)]

    def waiting(self) -> Sequence[str]:
        return ()

    async def close(self) -> None:
        self.control.close()
        self._weights.close()
        self._resources.close()
