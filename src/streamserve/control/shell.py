"""The asyncio shell around the Fleet: worker processes, their ZeroMQ messages, and the clients' queues.

clients ── open/close ──▶ Fleet.handle ── Send ──▶ ROUTER ═══ ipc ═══ DEALER  worker process
        ◀─── Deliver ───                ◀─ Heard ──                     (config on its stdin; it leaves
                                        ◀─ Lost ─── exit status          when that pipe closes)
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping

import msgspec
import zmq
import zmq.asyncio

from streamserve.control.events import (
    Close,
    Command,
    Deliver,
    Edit,
    FleetEvent,
    Heard,
    Kill,
    Lost,
    Open,
    Refuse,
    Rest,
    Send,
    Start,
    Tick,
)
from streamserve.control.fleet import Fleet, FleetConfig
from streamserve.control.mailbox import Mailbox, Undelivered
from streamserve.control.trace import Recorder
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.errors import CheckpointError, RequestError, StartError
from streamserve.protocol.messages import MAX_MESSAGE_BYTES, Event, Stop, Traced, decode_from_worker, encode
from streamserve.protocol.runtime_folder import RuntimeFolder, make_runtime_folder

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
STOP_SECONDS = 10.0

WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Unless told otherwise a worker's idle threads sleep: spinning ones take the cores from whoever they wait
for, this process included, and made steps ten times slower on a machine that had other things to do."""

WorkerSettings = Callable[[str, int, str], WorkerConfig]
"""What a worker is told: from its name, incarnation and the endpoint to connect to."""


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker is told all on its standard input; the server's settings, keys among them, are not for it."""
    return {name: value for name, value in environment.items() if not name.startswith("STREAMSERVE_")}


def _free(
    owner: int, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, folder: RuntimeFolder
) -> None:
    """Also for a shell that nobody closed: who collects a context with an open socket waits for ever. A
    fork of the process that owns them leaves them alone."""
    if os.getpid() != owner:
        return
    socket.close()
    context.term()
    folder.remove()


class FleetShell:
    """Runs a Fleet in the current event loop. Use as an async context manager, or `start` and `close`."""

    def __init__(
        self, config: FleetConfig, settings: WorkerSettings, recorder: Recorder | None = None
    ) -> None:
        self.fleet = Fleet(config)
        self._recorder = recorder
        self._settings = settings
        self._clients: dict[str, Mailbox] = {}
        self._undelivered = Undelivered()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closing = False
        self._free: Callable[[], object] = lambda: None

    async def start(self) -> None:
        """Bind the socket and start the workers; returns before they are ready."""
        folder = make_runtime_folder()
        self._folder = folder.path
        self._endpoint = f"ipc://{self._folder}/control"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(self._endpoint)
        self._free = weakref.finalize(self, _free, os.getpid(), self._socket, self._context, folder)
        self._spawn(self._receive())
        self._spawn(self._tick())
        await self._do(self.fleet.start(time.monotonic()))

    async def close(self) -> None:
        """Stop the workers and free everything; harmless when closed already. Open requests end with an
        error."""
        if self._closing:
            return
        self._closing = True
        for name in list(self._clients):
            error = RequestError("the server is shutting down", status=503, retry_after=5.0)
            self._clients[name].put(Refuse(name, error))
        try:
            for worker in self._processes:
                await self._send(Send(worker, Stop()))
            await asyncio.gather(*(self._end(process) for process in self._processes.values()))
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._free()
        if self._recorder:
            try:
                await asyncio.to_thread(self._recorder.close)
            except RuntimeError:  # Python ends, and starts no more threads
                self._recorder.close()

    async def __aenter__(self) -> "FleetShell":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def process_id(self, worker: str) -> int:
        """The process that runs a worker now."""
        return self._processes[worker].pid

    async def until_ready(self) -> None:
        """Wait for the workers. Raises CheckpointError if one cannot serve its model, StartError if one
        cannot start for another reason."""
        while not self.fleet.health()[0]:
            for failure in (worker.failure for worker in self.fleet.workers.values()):
                if failure:
                    raise (CheckpointError if failure.code == 2 else StartError)(failure.error)
            self._changed.clear()
            await self._changed.wait()

    async def submit(self, request: Open) -> AsyncGenerator[list[Event], None]:
        """Events of one request as they come; before them an empty list, once it is taken. Raises
        RequestError if it is refused or lost; leaving early cancels it."""
        if self._closing:
            raise RequestError("the server is shutting down", status=503, retry_after=5.0)
        if request.request in self._clients:
            raise RequestError(f"request id {request.request} is in use", status=409)
        queue = Mailbox(self._undelivered)
        self._clients[request.request] = queue
        done = False
        try:
            await self._handle(request)
            if queue.empty():
                yield []
            while not done:
                news = await queue.get()
                if isinstance(news, Refuse):
                    done = not queue.overflowed
                    raise news.error
                done = news.last
                yield news.events
        finally:
            del self._clients[request.request]
            queue.clear()
            if not done:
                await self.cancel(request.request)

    async def edit(self, edit: Edit) -> None:
        """Change the prompt of an open request, whose events go on in its `submit`. Raises RequestError,
        and changes nothing, if there is none, if its prompt is finished, or if the edit does not fit it."""
        error = self.fleet.edit_refusal(edit)
        if error:
            raise error
        await self._handle(edit)

    async def rest(self, worker: str, draining: bool) -> int:
        """Give a worker no new requests, or give it some again; returns how many are open at it, or at the
        other half of its pair. Raises RequestError if there is no such worker."""
        if worker not in self.fleet.workers:
            names = ", ".join(self.fleet.workers)
            raise RequestError(f"there is no worker {worker!r}; there are {names}", status=404)
        await self._handle(Rest(worker, draining))
        return self.fleet.open_at(worker)

    async def cancel(self, request: str, choice: int | None = None) -> None:
        """Stop a request, or one choice of it; harmless if it is over."""
        await self._handle(Close(request, choice))

    async def _handle(self, event: FleetEvent) -> None:
        now = time.monotonic()
        commands = self.fleet.handle(event, now)
        if self._recorder:
            self._recorder.observe(event, commands, now)
        await self._do(commands)

    async def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    await self._send(command)
                case Deliver() | Refuse():
                    if command.request in self._clients:
                        self._clients[command.request].put(command)
                case Start():
                    await self._launch(command) if not command.after else self._spawn(self._wait(command))
                case Kill():
                    logger.error("worker %s has been silent for too long: killing it", command.worker)
                    self._kill(command.worker)

    async def _send(self, command: Send) -> None:
        worker = self.fleet.workers[command.worker]
        identity = f"{command.worker}/{worker.incarnation}".encode()
        # A worker that is gone cannot be reached; its loss is being reported.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([identity, encode(command.message)])

    async def _wait(self, command: Start) -> None:
        await asyncio.sleep(command.after)
        if not self._closing:
            await self._launch(command)

    async def _launch(self, command: Start) -> None:
        config = self._settings(command.worker, command.incarnation, self._endpoint)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "streamserve.workers",
            stdin=asyncio.subprocess.PIPE,
            env=WORKER_ENVIRONMENT | _without_settings(os.environ),
            start_new_session=True,  # Ctrl-C is for us; we tell the workers
        )
        assert process.stdin is not None
        self._processes[command.worker] = process
        data = msgspec.msgpack.encode(config)
        process.stdin.write(len(data).to_bytes(4, "little") + data)
        self._spawn(self._watch(command, process))

    async def _watch(self, command: Start, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._closing:
            return
        reason = f"its process ended with exit status {code}"
        logger.error("worker %s: %s", command.worker, reason)
        await self._handle(Lost(command.worker, command.incarnation, reason))
        self._changed.set()

    async def _receive(self) -> None:
        while True:
            identity, data = await self._socket.recv_multipart()
            worker, _, incarnation = identity.decode().rpartition("/")
            try:
                message = decode_from_worker(data)
            except msgspec.DecodeError:
                logger.exception("worker %s sent what cannot be read: killing it", worker)
                self._kill(worker)
                continue
            if isinstance(message, Traced):
                if self._recorder:
                    self._recorder.worked(worker, message.work)
                continue
            await self._handle(Heard(worker, int(incarnation), message))
            self._changed.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self._handle(Tick())

    def _kill(self, worker: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[worker].kill()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for a process that was asked to leave; kill it if it does not."""
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            logger.critical("a task of the fleet failed", exc_info=task.exception())
