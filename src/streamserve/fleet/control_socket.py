"""The socket through which a server and its workers exchange messages.

server ── ROUTER ═══ ipc ═══ DEALER ── worker process, with the identity NAME/INCARNATION
"""

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import zmq
import zmq.asyncio

from streamserve.fleet.process_state import ProcessState
from streamserve.protocol.messages import MAX_MESSAGE_BYTES
from streamserve.system.runtime_folder import RuntimeFolder, make_runtime_folder

logger = logging.getLogger(__name__)


class ControlSocket:
    """The server's end of the socket, bound to an `endpoint` in a runtime `folder` that this class creates.
    Only the present processes of `workers` can exchange messages with it."""

    def __init__(self, workers: Mapping[str, ProcessState[Any]]) -> None:
        folder = make_runtime_folder()
        self.folder = folder.path
        self.endpoint = f"ipc://{self.folder}/control"
        self._workers = workers
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(self.endpoint)
        self.close: Callable[[], object] = weakref.finalize(
            self, _free, os.getpid(), self._socket, self._context, folder
        )

    @property
    def closed(self) -> bool:
        return self._context.closed

    async def send(self, worker: str, data: bytes) -> None:
        """Send a message to a worker. A message to a worker that is gone is dropped: its loss is reported
        separately."""
        state = self._workers.get(worker)
        if state is None:  # the worker was removed
            return
        identity = f"{worker}/{state.incarnation}".encode()
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([identity, data])

    async def receive(self) -> tuple[str, int, bytes]:
        """Return the next message of a worker, with the worker's name and incarnation. Messages of other
        senders are ignored, so that they cannot cause a worker to be killed."""
        while True:
            parts = await self._socket.recv_multipart()
            worker, _, incarnation = parts[0].decode(errors="replace").rpartition("/")
            state = self._workers.get(worker)
            if len(parts) == 2 and state is not None and incarnation == str(state.incarnation):
                return worker, state.incarnation, parts[1]
            # A worker that was removed or restarted may report until its process has ended.
            logger.debug("ignored a message of %r, which is not a running worker", parts[0][:64])


def _free(
    owner: int, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, folder: RuntimeFolder
) -> None:
    """Release the socket, the context and the runtime folder. Also runs as a finalizer for a socket that was
    never closed: otherwise, collecting a context with an open socket would block for ever. Does nothing in a
    fork of the process that owns them."""
    if os.getpid() != owner:
        return
    socket.close()
    context.term()
    folder.remove()
