"""Between a fleet and its workers: everything is passed on, and forged messages are slipped in."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.config import WorkerConfig
from streamserve.settings.resolve import Settings

Forge = Callable[[bytes, bytes], list[bytes]]
"""From a worker's identity and the message that was just passed on, what is sent after it."""


def nothing(identity: bytes, message: bytes) -> list[bytes]:
    """Forge nothing."""
    return []


class Wire:
    """A socket that workers take for the fleet's, and one a worker that the fleet takes for the worker's."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/wire"
        self.to_worker: Forge = nothing
        self.to_fleet: Forge = nothing
        self.forged = 0
        self.fleet_endpoint = ""
        self._context = zmq.asyncio.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind(self.endpoint)
        self._backs: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks = [asyncio.create_task(self._from_workers())]

    async def stranger(self, identity: bytes, parts: list[bytes]) -> None:
        """Say something to the fleet as somebody else."""
        socket = self._connect(identity)
        await socket.send_multipart(parts)
        await asyncio.sleep(0.01)
        socket.close(linger=100)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in (self._front, *self._backs.values()):
            socket.close()
        self._context.term()

    def _connect(self, identity: bytes) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.fleet_endpoint)
        return socket

    async def _from_workers(self) -> None:
        while True:
            identity, message = await self._front.recv_multipart()
            if identity not in self._backs:
                self._backs[identity] = self._connect(identity)
                self._tasks.append(asyncio.create_task(self._from_fleet(identity)))
            for part in (message, *self._forged(self.to_fleet, identity, message)):
                await self._backs[identity].send(part)

    async def _from_fleet(self, identity: bytes) -> None:
        while True:
            message = await self._backs[identity].recv()
            for part in (message, *self._forged(self.to_worker, identity, message)):
                await self._front.send_multipart([identity, part])

    def _forged(self, forge: Forge, identity: bytes, message: bytes) -> list[bytes]:
        made = forge(identity, message)
        self.forged += len(made)
        return made


class Wiretapped(AsyncLLM):
    """A model whose workers and fleet talk over a wire."""

    def __init__(self, settings: Settings, wire: Wire) -> None:
        super().__init__(settings)
        self._wire = wire

    def _worker_config(self, worker: str, incarnation: int, endpoint: str) -> WorkerConfig:
        self._wire.fleet_endpoint = endpoint
        config = super()._worker_config(worker, incarnation, endpoint)
        return msgspec.structs.replace(config, endpoint=self._wire.endpoint)
