"""`streamserve draft`: one draft model for many servers. Starts the worker process that drafts, tells what it
reports, and ends it.

    targets ◀═══ tcp, CURVE ═══▶ worker in its draft role ── reports ──▶ this process ──▶ terminal, /metrics
"""

import contextlib
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
from streamserve.draft_settings import DraftSettings
from streamserve.drafting.explain import explain
from streamserve.drafting.metrics import DraftCollector
from streamserve.protocol.config import LogLevel, WorkerConfig
from streamserve.protocol.curve import parse_endpoint, read_key_pair
from streamserve.protocol.drafting import DraftReady, DraftReport, decode_report
from streamserve.protocol.errors import CheckpointError, StartError
from streamserve.protocol.logs import configure_logging
from streamserve.protocol.messages import Failed, Stop, encode
from streamserve.protocol.runtime_folder import make_runtime_folder
from streamserve.protocol.stop_signals import stop_signals

EXPLAIN_SECONDS = 2.0
STOP_SECONDS = 10.0


def run(settings: DraftSettings, explaining: bool, log_level: LogLevel) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises CheckpointError if the model cannot be loaded or the
    address not be used, StartError if the worker ends."""
    configure_logging(log_level, "text")
    stopping = _stop_on_signals()
    with _socket() as (socket, endpoint), _worker(settings, endpoint, log_level) as process:
        typer.echo(f"streamserve {__version__}: loading {settings.name} …")
        collector = DraftCollector()
        peer, last, shown = b"", None, time.monotonic()
        while not stopping:
            if not socket.poll(200):
                if process.poll() is not None:
                    raise StartError(f"the draft worker ended with exit status {process.returncode}")
                continue
            peer, data = socket.recv_multipart()
            match decode_report(data):
                case DraftReady() as ready:
                    _metrics(settings, collector)
                    typer.echo(welcome(settings, ready))
                case Failed(error, _):
                    raise CheckpointError(error)
                case DraftReport() as report:
                    collector.report = report
                    if explaining and time.monotonic() - shown >= EXPLAIN_SECONDS:
                        typer.echo(explain(report, last) + "\n")
                        last, shown = report, time.monotonic()
        socket.send_multipart([peer, encode(Stop())])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def welcome(settings: DraftSettings, ready: DraftReady) -> str:
    """What is printed once targets may come."""
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


def _stop_on_signals() -> list[int]:
    """A list that is empty until a signal asks to stop."""
    seen: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, frame: seen.append(number))
    return seen


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
    """The worker process; it leaves when its standard input closes, however that comes about."""
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
