"""Runs a Fleet: passes it the events of workers, processes and the clock, and executes its commands.

Launcher ───────── WorkerMessage ──▶                ── Send ────────────▶ Launcher
WorkerProcesses ── WorkerLost ─────▶  Fleet.handle  ── Start, Kill, Retire ─▶ WorkerProcesses
clock ──────────── Tick ───────────▶                ── Deliver, Refuse ─▶ Mailboxes
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from streamserve.fleet.events import (
    Command,
    Deliver,
    FleetEvent,
    Kill,
    Refuse,
    Retire,
    Send,
    Start,
    Tick,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.launcher import MakeLauncher
from streamserve.fleet.mailbox import Mailboxes
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.fleet.tracing.recorder import Recorder
from streamserve.fleet.worker_process import WorkerProcesses
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    AdapterLoaded,
    Cached,
    Events,
    Ready,
    Stop,
    Traced,
    decode_from_worker,
    encode,
)
from streamserve.protocol.reports import Report

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5

WorkerSettings = Callable[[str, int, str], WorkerConfig]
"""Builds a worker's configuration from its name, its incarnation and the endpoint to connect to."""


class FleetDriver:
    """Drives a Fleet in the current event loop, until it is closed. `changed` is called after each event of a
    worker, `fatal` with an unrecoverable error."""

    def __init__(
        self,
        fleet: Fleet,
        mailboxes: Mailboxes,
        settings: WorkerSettings,
        make_launcher: MakeLauncher,
        recorder: Recorder | None,
        changed: Callable[[], None],
        fatal: Callable[[Exception], None],
    ) -> None:
        self.launcher = make_launcher(fleet.workers)
        self.processes = WorkerProcesses(
            self.launcher.start,
            self._configure,
            self._lost,
            self.handle,
        )
        self.crash_reports = self.observer_failures = 0
        self._fleet = fleet
        self._settings = settings
        self._mailboxes = mailboxes
        self._recorder = recorder
        self._changed = changed
        self._tasks = TaskSupervisor(fatal)

    def _configure(self, worker: str, incarnation: int) -> WorkerConfig:
        """Return the configuration of a worker's next process."""
        config = self._settings(worker, incarnation, self.launcher.endpoint)
        return msgspec.structs.replace(config, expected=self._fleet.supervisor.expected(worker))

    async def start(self) -> None:
        """Start the workers; return before they are ready."""
        self._tasks.run_loop(self._receive, "receive")
        self._tasks.run_loop(self._tick, "tick")
        await self._do(self._fleet.start(time.monotonic()))

    async def close(self) -> None:
        """Stop the workers and free all resources."""
        try:
            for worker in self._fleet.workers:
                await self._send(Send(worker, Stop()))
            await self.processes.close()
            await self._tasks.close()
        finally:
            await self.launcher.close()

    async def handle(self, event: FleetEvent) -> None:
        """Pass an event to the fleet and execute the resulting commands."""
        now = time.monotonic()
        commands = self._fleet.handle(event, now)
        if self._recorder:
            self._observe(self._recorder, event, commands, now)
        await self._do(commands)

    def _observe(self, recorder: Recorder, event: FleetEvent, commands: list[Command], now: float) -> None:
        """Record an event and its commands. A recorder that fails is logged, counted and no longer used."""
        try:
            recorder.observe(event, commands, now)
        except Exception:
            logger.exception("the request recorder failed: requests are no longer recorded")
            self.observer_failures += 1
            self._recorder = None

    async def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    await self._send(command)
                case Deliver() | Refuse():
                    self._mailboxes.put(command)
                case Start():
                    if command.incarnation > 1:
                        logger.warning("worker %s: restarting in %.1f s", command.worker, command.after)
                    self._tasks.spawn(self.processes.run(command))
                case Retire():
                    self._tasks.spawn(self._retire(command))
                case Kill(worker, reason):
                    logger.error("worker %s is killed: %s", worker, reason)
                    self.processes.kill(worker)

    async def _retire(self, retire: Retire) -> None:
        logger.info("worker %s: removed", retire.worker)
        await self.processes.retire(retire)

    async def _send(self, command: Send) -> None:
        await self.launcher.send(command.worker, encode(command.message))

    async def _lost(self, lost: WorkerLost) -> None:
        """Process the end of a worker's process."""
        self.crash_reports += bool(lost.report)
        phase = f", in phase {lost.phase}" if lost.phase else ""
        logger.error("worker %s: %s%s", lost.worker, lost.reason, phase)
        await self.handle(lost)
        self._changed()

    async def _receive(self) -> None:
        while True:
            worker, incarnation, data = await self.launcher.receive()
            try:
                message = decode_from_worker(data)
            except msgspec.DecodeError:
                logger.exception("worker %s sent a message that cannot be decoded: killing it", worker)
                self.processes.kill(worker)
                continue
            if isinstance(message, Traced):
                if self._recorder:
                    self._recorder.record_work(worker, message.work)
                continue
            if isinstance(message, AdapterLoaded) and message.error:
                logger.error("worker %s: a LoRA adapter cannot be loaded: %s", worker, message.error)
            if isinstance(message, Ready) and incarnation > 1:
                logger.info("worker %s serves again", worker)
            await self._hear(WorkerMessage(worker, incarnation, message))
            self._changed()

    async def _hear(self, event: WorkerMessage) -> None:
        """Process a worker's message. If that fails, only the requests of the message fail, or the worker is
        killed."""
        try:
            await self.handle(event)
            return
        except Exception:
            logger.exception("failed to process a message of worker %s", event.worker)
        if isinstance(event.message, Events):
            error = RequestError("the server failed to handle this request", status=500)
            for name in {failed.request for failed in event.message.events}:
                await self._do(self._fleet.abandon(name, error))
        # Reports and cached blocks are only hints. Any other lost message would leave worker and fleet
        # inconsistent.
        elif not isinstance(event.message, Report | Cached):
            self.processes.kill(event.worker)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self.handle(Tick(self.processes.beats()))
