"""A worker process that a test controls."""

import asyncio

import zmq.asyncio

from streamserve.fleet.events import Heartbeat, WorkerLost
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.messages import Events, Stop, Submit, Token, decode_to_worker, encode
from tests.fleet.fakes import READY


class FakeWorker:
    """Answers every request with its tokens, at once."""

    pid = 0

    def __init__(self, config: WorkerConfig) -> None:
        self.ended = asyncio.Event()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, (config.peer or config.worker).encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(config.endpoint)
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        await self._socket.send(encode(READY))
        while True:
            message = decode_to_worker(await self._socket.recv())
            if isinstance(message, Stop):
                self.ended.set()
            if isinstance(message, Submit):
                limit = message.params.max_tokens
                ends = ["length" if n == limit - 1 else None for n in range(limit)]
                tokens = [
                    Token(message.request, message.attempt, 0, n, n, finish=ends[n])
                    for n in range(len(message.outputs[0]), limit)
                ]
                await self._socket.send(encode(Events(tokens)))

    def beat(self) -> Heartbeat | None:
        return None

    async def watch(self, worker: str, incarnation: int) -> WorkerLost:
        await self.ended.wait()
        await self._close()
        return WorkerLost(worker, incarnation, "it was killed", frozenset())

    def kill(self) -> None:
        self.ended.set()

    async def stop(self, grace: float = 0.0) -> None:
        await self._close()

    async def _close(self) -> None:
        """Close the socket, once nothing sends any more."""
        self._serving.cancel()
        await asyncio.wait({self._serving})
        self._socket.close()
