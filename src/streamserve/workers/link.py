"""A worker's connection to the server, or to the agent that started it."""

import logging

import msgspec
import zmq

from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Adopt,
    FromWorker,
    Leave,
    Stop,
    ToEngine,
    decode_to_worker,
    encode,
)

logger = logging.getLogger(__name__)


class WorkerLink:
    """Connects a worker to its configured endpoint, under its configured name."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, (config.peer or config.worker).encode())
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(config.endpoint)

    def __enter__(self) -> "WorkerLink":
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def receive(self, wait: int | None) -> list[ToEngine] | Stop | Leave | Adopt:
        """Return the messages that have arrived, after waiting at most `wait` milliseconds (None: without
        limit).

        A message that is not for the engine is returned alone; messages that arrived before it are
        dropped.
        """
        messages: list[ToEngine] = []
        while self._socket.poll(wait):
            wait = 0
            try:
                message = decode_to_worker(self._socket.recv())
            except msgspec.DecodeError:
                logger.exception("dropped a message that cannot be decoded")
                continue
            if isinstance(message, Stop | Leave | Adopt):
                return message
            messages.append(message)
        return messages
