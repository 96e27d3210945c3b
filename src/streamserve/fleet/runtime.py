"""The asyncio runtime of the Fleet: worker processes, their ZeroMQ messages, and the clients' queues.

clients ── open/close ──▶ Fleet.handle ── Send ──────────▶ ROUTER ═══ ipc ═══ DEALER  worker process
        ◀─── Deliver ───                ◀─ WorkerMessage ──                     (config on its stdin; exits
                                        ◀─ WorkerLost ───── exit status          when that pipe closes)
"""

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import (
    Close,
    Command,
    Deliver,
    Drain,
    Edit,
    FleetEvent,
    Kill,
    Open,
    Refuse,
    Send,
    Start,
    Tick,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.mailbox import Mailbox, MailboxBudget
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.fleet.tracing.recorder import Recorder
from streamserve.fleet.worker_process import WorkerProcess, start_worker
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.errors import CheckpointError, FleetError, RequestError, StartError
from streamserve.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Cached,
    Event,
    Events,
    Stop,
    Traced,
    decode_from_worker,
    encode,
)
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.runtime_folder import RuntimeFolder, make_runtime_folder

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
WorkerSettings = Callable[[str, int, str], WorkerConfig]
"""Builds a worker's configuration from its name, its incarnation and the endpoint to connect to."""

Launch = Callable[[WorkerConfig], Awaitable[WorkerProcess]]
"""Starts a worker. Raises OSError if that is not possible now."""


def _free(
    owner: int, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, folder: RuntimeFolder
) -> None:
    """Release the socket, the context and the runtime folder. Runs as a finalizer too, for a runtime that was
    never closed: collecting a context that has an open socket blocks for ever. Does nothing in a fork of the
    process that owns them."""
    if os.getpid() != owner:
        return
    socket.close()
    context.term()
    folder.remove()


class FleetRuntime:
    """Runs a Fleet in the current event loop. Use as an async context manager, or `start` and `close`."""

    def __init__(
        self,
        config: FleetConfig,
        settings: WorkerSettings,
        recorder: Recorder | None = None,
        launch: Launch = start_worker,
    ) -> None:
        self.fleet = Fleet(config)
        self._launch = launch
        self._recorder = recorder
        self._settings = settings
        self._clients: dict[str, Mailbox] = {}
        self._mailbox_budget = MailboxBudget()
        self._processes: dict[str, WorkerProcess] = {}
        self._tasks = TaskSupervisor(self._give_up)
        self._failure: FleetError | None = None
        self._crash_reports = self._observer_failures = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._free: Callable[[], object] = lambda: None

    async def start(self) -> None:
        """Bind the socket and start the workers; return before they are ready."""
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
        self._tasks.run_loop(self._receive, "receive")
        self._tasks.run_loop(self._tick, "tick")
        await self._do(self.fleet.start(time.monotonic()))

    async def close(self) -> None:
        """Stop the workers and free all resources; idempotent. Open requests end with an error."""
        if self._closing:
            return
        self._closing = True
        for name in list(self._clients):
            error = RequestError("the server is shutting down", status=503, retry_after=5.0)
            self._clients[name].put(Refuse(name, error))
        try:
            for worker in self._processes:
                await self._send(Send(worker, Stop()))
            await asyncio.gather(*(process.end() for process in self._processes.values()))
            await self._tasks.close()
        finally:
            self._free()
        if self._recorder:
            try:
                await asyncio.to_thread(self._recorder.close)
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                self._recorder.close()

    async def __aenter__(self) -> "FleetRuntime":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def process_id(self, worker: str) -> int:
        """Return the id of a worker's present process."""
        return self._processes[worker].pid

    async def until_ready(self) -> None:
        """Wait until the workers are ready. Raises CheckpointError if one cannot serve its model, StartError
        if one cannot start for another reason, FleetError if the runtime itself failed."""
        while not self.fleet.health()[0]:
            if self._failure:
                raise self._failure
            for failure in (worker.failure for worker in self.fleet.workers.values()):
                if failure:
                    raise (CheckpointError if failure.code == 2 else StartError)(failure.error)
            if not self.fleet.supervisor.can_serve:
                raise StartError(self.fleet.health()[1])
            self._changed.clear()
            await self._changed.wait()

    async def until_failed(self) -> None:
        """Wait until the runtime fails. Raises FleetError."""
        while self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    def incidents(self) -> IncidentReport:
        """Return the incident counters so far."""
        return msgspec.structs.replace(
            self.fleet.incidents(),
            crash_reports=self._crash_reports,
            observer_failures=self._observer_failures + (self._recorder.failures if self._recorder else 0),
        )

    async def submit(self, request: Open) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one request as they arrive; first an empty list, once the request is accepted.
        Raises RequestError if it is refused or lost. Closing the generator early cancels the request."""
        if self._closing:
            raise RequestError("the server is shutting down", status=503, retry_after=5.0)
        if self._failure:
            raise RequestError(str(self._failure), status=500)
        if request.request in self._clients:
            raise RequestError(f"request id {request.request} is in use", status=409)
        queue = Mailbox(self._mailbox_budget)
        self._clients[request.request] = queue
        done = False
        try:
            await self._handle(request)
            if queue.empty():
                yield []
            while not done:
                message = await queue.get()
                if isinstance(message, Refuse):
                    done = not queue.overflowed
                    raise message.error
                done = message.last
                yield message.events
        finally:
            del self._clients[request.request]
            queue.clear()
            if not done:
                await self.cancel(request.request)

    async def edit(self, edit: Edit) -> None:
        """Edit the prompt of an open request; its events continue in its `submit`. Raises RequestError, and
        changes nothing, if there is no such request, if its prompt is complete, or if the edit does not fit
        it."""
        error = self.fleet.edit_refusal(edit)
        if error:
            raise error
        await self._handle(edit)

    async def drain(self, worker: str, draining: bool) -> int:
        """Start or end draining a worker; return the number of requests open at it or at its partner in a
        pair. Raises RequestError if there is no such worker."""
        if worker not in self.fleet.workers:
            names = ", ".join(self.fleet.workers)
            raise RequestError(f"there is no worker {worker!r}; there are {names}", status=404)
        await self._handle(Drain(worker, draining))
        return self.fleet.open_at(worker)

    async def cancel(self, request: str, choice: int | None = None) -> None:
        """Cancel a request, or one choice of it; a no-op if it is over."""
        await self._handle(Close(request, choice))

    async def _handle(self, event: FleetEvent) -> None:
        now = time.monotonic()
        commands = self.fleet.handle(event, now)
        if self._recorder:
            self._observe(self._recorder, event, commands, now)
        await self._do(commands)

    def _observe(self, recorder: Recorder, event: FleetEvent, commands: list[Command], now: float) -> None:
        """Record an event and its commands. A recorder that fails is logged, counted and no longer used."""
        try:
            recorder.observe(event, commands, now)
        except Exception:
            logger.exception("the request recorder failed: requests are no longer recorded")
            self._observer_failures += 1
            self._recorder = None

    async def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    await self._send(command)
                case Deliver() | Refuse():
                    if command.request in self._clients:
                        self._clients[command.request].put(command)
                case Start():
                    self._tasks.spawn(self._run(command))
                case Kill():
                    logger.error(
                        "worker %s has not responded for too long, or its KV format differs: killing it",
                        command.worker,
                    )
                    self._kill(command.worker)

    async def _send(self, command: Send) -> None:
        worker = self.fleet.workers[command.worker]
        identity = f"{command.worker}/{worker.incarnation}".encode()
        # A worker that is gone cannot be reached; its loss is reported separately.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([identity, encode(command.message)])

    async def _run(self, command: Start) -> None:
        """Start a worker's process and report its end; a failed start is reported as a loss."""
        await asyncio.sleep(command.after)
        if self._closing:
            return
        worker, incarnation = command.worker, command.incarnation
        try:
            process = await self._launch(self._settings(worker, incarnation, self._endpoint))
        except OSError as error:
            lost = WorkerLost(worker, incarnation, f"it could not be started: {error}", frozenset())
        else:
            self._processes[worker] = process
            if self._closing:
                await process.end()
                return
            lost = await process.lost(worker, incarnation)
        if self._closing:
            return
        self._crash_reports += bool(lost.report)
        logger.error("worker %s: %s%s", worker, lost.reason, f", in phase {lost.phase}" if lost.phase else "")
        await self._handle(lost)
        self._changed.set()

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            sender = self._sender(parts)
            if sender is None:
                logger.warning("ignored a message of %r, which is not a running worker", parts[0][:64])
                continue
            worker, incarnation = sender
            try:
                message = decode_from_worker(parts[1])
            except msgspec.DecodeError:
                logger.exception("worker %s sent a message that cannot be decoded: killing it", worker)
                self._kill(worker)
                continue
            if isinstance(message, Traced):
                if self._recorder:
                    self._recorder.record_work(worker, message.work)
                continue
            await self._hear(WorkerMessage(worker, incarnation, message))
            self._changed.set()

    def _sender(self, parts: list[bytes]) -> tuple[str, int] | None:
        """Return the worker that sent a message and its incarnation; None for an unknown sender, so that its
        bytes cannot cause a worker to be killed."""
        name = parts[0].decode(errors="replace")
        worker, _, incarnation = name.rpartition("/")
        state = self.fleet.workers.get(worker)
        if len(parts) != 2 or state is None or incarnation != str(state.incarnation):
            return None
        return worker, state.incarnation

    async def _hear(self, event: WorkerMessage) -> None:
        """Process a worker's message. If that fails, only the message's requests fail, or its worker is
        killed."""
        try:
            await self._handle(event)
            return
        except Exception:
            logger.exception("failed to process a message of worker %s", event.worker)
        if isinstance(event.message, Events):
            error = RequestError("the server failed to handle this request", status=500)
            for name in {failed.request for failed in event.message.events}:
                await self._do(self.fleet.abandon(name, error))
        elif not isinstance(event.message, Report | Cached):
            self._kill(event.worker)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            latest = {name: process.beat() for name, process in self._processes.items()}
            states = self.fleet.workers
            beats = {(name, states[name].incarnation): beat for name, beat in latest.items() if beat}
            await self._handle(Tick(beats))

    def _kill(self, worker: str) -> None:
        if worker in self._processes:
            self._processes[worker].kill()

    def _give_up(self, error: Exception) -> None:
        """Handle an unrecoverable failure: refuse all requests and report the failure to the caller of
        `until_failed`."""
        logger.critical("the fleet failed", exc_info=error)
        self._failure = FleetError(f"the server failed: {type(error).__name__}")
        for name in list(self._clients):
            refusal = RequestError(str(self._failure), status=500)
            self._clients[name].put(Refuse(name, refusal))
        self._changed.set()
