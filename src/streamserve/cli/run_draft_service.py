"""Runs a draft service: starts the worker process that drafts, prints its reports, and restarts it when it
dies.

targets ◀═══ tcp, CURVE ═══▶ worker in its draft role ── reports ──▶ this process ──▶ terminal, /metrics
"""

import asyncio
import logging
import math
import time

import msgspec
from prometheus_client import CollectorRegistry, start_http_server

from streamserve import __version__
from streamserve.cli.announce import announce
from streamserve.draft_service.server.explain import explain
from streamserve.draft_service.server.metrics import DraftCollector
from streamserve.fleet.events import Start, WorkerLost
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.fleet.process_state import ProcessState, SupervisionPolicy, Watch
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.fleet.worker_process import STOP_SECONDS, WorkerProcesses
from streamserve.protocol.config import LogLevel, WorkerConfig
from streamserve.protocol.curve import parse_endpoint, read_key_pair
from streamserve.protocol.drafting import DraftReady, DraftReport, decode_report
from streamserve.protocol.errors import CheckpointError, StartError
from streamserve.protocol.messages import Failed, Stop, encode
from streamserve.settings.draft import DraftSettings
from streamserve.system.logs import configure_logging
from streamserve.system.stop_signals import stop_signals

logger = logging.getLogger(__name__)

EXPLAIN_SECONDS = 2.0
TICK_SECONDS = 0.5
WORKER = "draft"

POLICY = SupervisionPolicy(
    stuck_after=10.0,  # reports are sent twice a second, even while it drafts
    idle_factor=1.0,
    load_silence=math.inf,  # it gives no sign of life before it is ready
    immediate_restarts=0,
    max_back_off=30.0,
    stable_seconds=30.0,
)


def run(settings: DraftSettings, explaining: bool, log_level: LogLevel) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; a second signal kills the worker.

    A worker that was ready and dies is restarted at the same address, after a pause that doubles each time.
    Raises CheckpointError if the model cannot be loaded or the address cannot be used, StartError if the
    first worker ends before it is ready.
    """
    configure_logging(log_level, "text")
    asyncio.run(_serve(settings, _Status(settings, explaining), log_level))


async def _serve(settings: DraftSettings, status: "_Status", log_level: LogLevel) -> None:
    supervisor = DraftSupervisor(settings, status, log_level)
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    announce(f"streamserve {__version__}: loading {status.name} …")
    await supervisor.run()


class DraftSupervisor:
    """Keeps the worker process of a draft service running, by the same rules as a server's workers. Must be
    created in a running event loop."""

    def __init__(self, settings: DraftSettings, status: "_Status", log_level: LogLevel) -> None:
        self._settings = settings
        self._status = status
        self._log_level = log_level
        self._worker: ProcessState[DraftReady] = ProcessState()
        self._launcher = LocalLauncher({WORKER: self._worker})
        self._processes = WorkerProcesses(self._launcher.start, self._config, self._lost)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSupervisor(self._fail)

    async def run(self) -> None:
        """Serve until `stop`. Raises CheckpointError or StartError if the first worker cannot serve."""
        self._worker.starts(time.monotonic())
        self._tasks.spawn(self._processes.run(Start(WORKER, self._worker.incarnation)))
        self._tasks.spawn(self._receive())
        self._tasks.spawn(self._tick())
        try:
            await self._over
        finally:
            await self._launcher.send(WORKER, encode(Stop()))
            # A worker that is loading its model reads no messages: it ends when its standard input is closed.
            await self._processes.close(STOP_SECONDS if self._worker.ready else 0.0)
            await self._tasks.close()
            await self._launcher.close()

    def stop(self) -> None:
        """Stop the worker; the second call kills it."""
        if self._over.done():
            self._processes.kill(WORKER)
        else:
            self._over.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _config(self, worker: str, incarnation: int) -> WorkerConfig:
        """Return the configuration of the next process. It listens at the port to which an earlier process
        was bound, because targets know this port."""
        drafting = self._settings.drafting
        return WorkerConfig(
            worker=f"{worker}/{incarnation}",
            role="draft",
            endpoint=self._launcher.endpoint,
            model=self._settings.model,
            drafting=msgspec.structs.replace(drafting, listen=self._status.address or drafting.listen),
            log_level=self._log_level,
        )

    async def _receive(self) -> None:
        """Process the worker's messages."""
        while True:
            _, _, data = await self._launcher.receive()
            now = time.monotonic()
            self._worker.hear(now)
            match decode_report(data):
                case DraftReady() as ready:
                    self._worker.join(ready, now)
                    self._status.ready(ready)
                case DraftReport() as report:
                    self._status.report(report)
                case Failed(error, _) as failure:
                    self._worker.fail(failure, final=not self._status.address)
                    if self._worker.failure:
                        raise CheckpointError(error)

    async def _lost(self, lost: WorkerLost) -> None:
        """Restart the worker. Raises StartError if no worker was ever ready."""
        wait = self._worker.lose(lost.reason, time.monotonic(), POLICY, final=not self._status.address)
        if wait is None:
            raise StartError(f"the draft worker cannot start: {self._worker.error}")
        logger.error("the draft worker: %s: restarting it in %.1f s", self._worker.error, wait)
        self._status.collector.restarts += 1
        self._tasks.spawn(self._processes.run(Start(WORKER, self._worker.incarnation, wait)))

    async def _tick(self) -> None:
        """Kill the worker if it has been silent for too long."""
        watch = Watch()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if self._worker.tick(None, now, POLICY, watch.look(now)):
                self._processes.kill(WORKER)


class _Status:
    """The state shown in the terminal and in /metrics.

    `address` is the address at which the service listens; "" before it does.
    """

    def __init__(self, settings: DraftSettings, explaining: bool) -> None:
        self.address = ""
        self.name = settings.name
        self.collector = DraftCollector()
        self._settings = settings
        self._explaining = explaining
        self._last: DraftReport | None = None
        self._explained_at = time.monotonic()

    def ready(self, ready: DraftReady) -> None:
        """Show that a worker is ready to draft."""
        if self.address:
            logger.warning("the draft worker is ready again at %s", ready.address)
            return
        self.address = ready.address
        _metrics(self._settings, self.collector)
        announce(welcome(self._settings, ready))

    def report(self, report: DraftReport) -> None:
        """Show a worker's report."""
        self.collector.report = report
        if self._explaining and time.monotonic() - self._explained_at >= EXPLAIN_SECONDS:
            last = self._last if self._last and self._last.at <= report.at else None
            announce(explain(report, last) + "\n")
            self._last, self._explained_at = report, time.monotonic()


def welcome(settings: DraftSettings, ready: DraftReady) -> str:
    """Return the text to print when targets can connect."""
    model, address = ready.model, ready.address
    key = f"{read_key_pair(settings.drafting.key).public.hex()}@" if settings.drafting.key else ""
    return f"""
  model     {settings.name}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters, {model.dtype}
  memory    {ready.kv_cache_bytes / 1e6:.0f} MB KV cache ({ready.num_blocks} blocks)
  ready     in {ready.load_seconds:.1f} s at {address}

  Use it:

    streamserve serve MODEL --draft tcp://{key}{address.removeprefix("tcp://")}
"""


def _metrics(settings: DraftSettings, collector: DraftCollector) -> None:
    if settings.drafting.metrics:
        endpoint = parse_endpoint(f"tcp://{settings.drafting.metrics}")
        registry = CollectorRegistry()
        registry.register(collector)
        server, _ = start_http_server(endpoint.port, endpoint.host, registry)
        announce(f"  metrics   at http://{endpoint.host}:{server.server_port}/metrics")
