"""Run a draft service: start the worker process that drafts, print its reports, restart it when it dies.

targets ◀═══ tcp, CURVE ═══▶ worker in its draft role ── reports ──▶ this process ──▶ terminal, /metrics
"""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import typer
import zmq
from prometheus_client import CollectorRegistry, start_http_server

from streamserve import __version__
from streamserve.draft_service.server.explain import explain
from streamserve.draft_service.server.metrics import DraftCollector
from streamserve.protocol.config import LogLevel, WorkerConfig
from streamserve.protocol.curve import parse_endpoint, read_key_pair
from streamserve.protocol.drafting import DraftReady, DraftReport, decode_report
from streamserve.protocol.errors import CheckpointError, StartError
from streamserve.protocol.logs import configure_logging
from streamserve.protocol.messages import Failed, Stop, encode
from streamserve.protocol.runtime_folder import make_runtime_folder
from streamserve.protocol.stop_signals import stop_signals
from streamserve.settings.draft import DraftSettings

logger = logging.getLogger(__name__)

EXPLAIN_SECONDS = 2.0
STOP_SECONDS = 10.0
MIN_BACKOFF, MAX_BACKOFF = 0.5, 30.0
"""Backoff in seconds before a dead worker is restarted; reset after a worker that lived longer than the
maximum."""
REPORT_TIMEOUT = 30.0
"""Seconds without a report after which a worker is killed; reports are sent twice a second, also while it
drafts."""


def run(settings: DraftSettings, explaining: bool, log_level: LogLevel) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    A worker that dies once it was ready is restarted at the same address, after a pause that doubles each
    time. Raises CheckpointError if the model cannot be loaded or the address cannot be used, StartError if
    the first worker ends before it is ready.
    """
    configure_logging(log_level, "text")
    received = _collect_stop_signals()
    status = _Status(settings, explaining)
    backoff = MIN_BACKOFF
    with _socket() as (socket, endpoint):
        while not received:
            started = time.monotonic()
            with _worker(settings, endpoint, log_level) as process:
                ended = _monitor(socket, process, status, received)
            if received:
                return
            if not status.address:
                raise StartError(f"the draft worker {ended}")
            settings = _with_address(settings, status.address)
            backoff = MIN_BACKOFF if time.monotonic() - started >= MAX_BACKOFF else backoff
            logger.error("the draft worker %s: restarting it in %.1f s", ended, backoff)
            status.collector.restarts += 1
            until = time.monotonic() + backoff
            while not received and time.monotonic() < until:
                time.sleep(0.05)
            backoff = min(2 * backoff, MAX_BACKOFF)


class _Status:
    """The state shown on the terminal and in /metrics.

    `address` is where the service listens, once it does.
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
        typer.echo(welcome(self._settings, ready))

    def report(self, report: DraftReport) -> None:
        """Show a worker's report."""
        self.collector.report = report
        if self._explaining and time.monotonic() - self._explained_at >= EXPLAIN_SECONDS:
            last = self._last if self._last and self._last.at <= report.at else None
            typer.echo(explain(report, last) + "\n")
            self._last, self._explained_at = report, time.monotonic()


def _monitor(
    socket: zmq.Socket[bytes], process: subprocess.Popen[bytes], status: _Status, received: list[int]
) -> str:
    """Process a worker's messages until it ends, or until a signal asks to stop it; return how it ended."""
    if not status.address:
        typer.echo(f"streamserve {__version__}: loading {status.name} …")
    peer, ready, last_message = b"", False, time.monotonic()
    while not received:
        if not socket.poll(200):
            if process.poll() is not None:
                return f"ended with exit status {process.returncode}"
            if ready and time.monotonic() - last_message > REPORT_TIMEOUT:
                process.kill()
                return f"sent no report for {REPORT_TIMEOUT:.0f} s"
            continue
        peer, data = socket.recv_multipart()
        last_message = time.monotonic()
        match decode_report(data):
            case DraftReady() as ready_message:
                ready = True
                status.ready(ready_message)
            case Failed(error, _):
                if not status.address:
                    raise CheckpointError(error)
                return f"cannot start: {error}"
            case DraftReport() as report:
                status.report(report)
    if peer:  # a worker that has sent nothing yet ends when its standard input closes
        socket.send_multipart([peer, encode(Stop())])
        until = time.monotonic() + STOP_SECONDS
        while process.poll() is None and time.monotonic() < until and len(received) < 2:
            time.sleep(0.05)
    if len(received) > 1:
        process.kill()
    return "was stopped"


def _with_address(settings: DraftSettings, address: str) -> DraftSettings:
    """Return the settings with the port that was bound, which targets know by now."""
    drafting = msgspec.structs.replace(settings.drafting, listen=address)
    return dataclasses.replace(settings, drafting=drafting)


def welcome(settings: DraftSettings, ready: DraftReady) -> str:
    """Return the text to print once targets can connect."""
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
        typer.echo(f"  metrics   at http://{endpoint.host}:{server.server_port}/metrics")


def _collect_stop_signals() -> list[int]:
    """Return a list of the received stop signals, which is empty at first."""
    received: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, frame: received.append(number))
    return received


@contextlib.contextmanager
def _socket() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    folder = make_runtime_folder()
    endpoint = f"ipc://{folder.path / 'control'}"
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 500)
            socket.bind(endpoint)
            yield socket, endpoint
    finally:
        folder.remove()


@contextlib.contextmanager
def _worker(settings: DraftSettings, endpoint: str, log_level: LogLevel) -> Iterator[subprocess.Popen[bytes]]:
    """Start the worker process. It exits when its standard input closes, for whatever reason."""
    config = WorkerConfig(
        worker="draft",
        role="draft",
        endpoint=endpoint,
        model=settings.model,
        drafting=settings.drafting,
        log_level=log_level,
    )
    data = msgspec.msgpack.encode(config)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "streamserve.workers"],
        stdin=subprocess.PIPE,
        env={"OMP_WAIT_POLICY": "PASSIVE"}
        | {name: value for name, value in os.environ.items() if not name.startswith("STREAMSERVE_")},
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(len(data).to_bytes(4, "little") + data)
        process.stdin.flush()
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
