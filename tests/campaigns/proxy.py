"""A proxy between a fleet and its workers: forwards all messages, and adds forged ones."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.config import WorkerConfig
from streamserve.settings.options import Settings

Forge = Callable[[bytes, bytes], list[bytes]]
"""Maps a worker's identity and the message that was just forwarded to the messages that are sent after it."""


def forge_nothing(identity: bytes, message: bytes) -> list[bytes]:
    """Return no messages."""
    return []


class Proxy:
    """Forwards messages: one socket that workers connect to, and one connection to the fleet for each
    worker."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/proxy"
        self.to_worker: Forge = forge_nothing
        self.to_fleet: Forge = forge_nothing
        self.forged = 0
        self.fleet_endpoint = ""
        self._context = zmq.asyncio.Context()
        self._worker_socket = self._context.socket(zmq.ROUTER)
        self._worker_socket.setsockopt(zmq.LINGER, 0)
        self._worker_socket.bind(self.endpoint)
        self._fleet_sockets: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks = [asyncio.create_task(self._from_workers())]

    async def send_as(self, identity: bytes, parts: list[bytes]) -> None:
        """Send a message to the fleet under another identity."""
        socket = self._connect(identity)
        await socket.send_multipart(parts)
        await asyncio.sleep(0.01)
        socket.close(linger=100)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in (self._worker_socket, *self._fleet_sockets.values()):
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
            identity, message = await self._worker_socket.recv_multipart()
            if identity not in self._fleet_sockets:
                self._fleet_sockets[identity] = self._connect(identity)
                self._tasks.append(asyncio.create_task(self._from_fleet(identity)))
            for part in (message, *self._forged(self.to_fleet, identity, message)):
                await self._fleet_sockets[identity].send(part)

    async def _from_fleet(self, identity: bytes) -> None:
        while True:
            message = await self._fleet_sockets[identity].recv()
            for part in (message, *self._forged(self.to_worker, identity, message)):
                await self._worker_socket.send_multipart([identity, part])

    def _forged(self, forge: Forge, identity: bytes, message: bytes) -> list[bytes]:
        messages = forge(identity, message)
        self.forged += len(messages)
        return messages


class ProxiedAsyncLLM(AsyncLLM):
    """A model whose workers and fleet communicate through a proxy."""

    def __init__(self, settings: Settings, proxy: Proxy) -> None:
        super().__init__(settings)
        self._wire = proxy

    def _worker_config(self, worker: str, incarnation: int, endpoint: str) -> WorkerConfig:
        self._wire.fleet_endpoint = endpoint
        config = super()._worker_config(worker, incarnation, endpoint)
        return msgspec.structs.replace(config, endpoint=self._wire.endpoint)
