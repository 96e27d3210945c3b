"""The HTTP server: uvicorn on a socket that is bound before any slow part of the startup."""

import asyncio
import errno
import logging
import math
import os
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from streamserve.api.http.connection import HttpConnection, Timeouts
from streamserve.api.http.connection_limits import ConnectionLimits, Connections
from streamserve.api.http.drain import RequestGate
from streamserve.api.http.slices import Slices
from streamserve.api.http.tls_listener import TlsListener
from streamserve.api.http.websocket import SocketProtocol
from streamserve.system.stop_signals import stop_signals
from streamserve.system.throttle import throttled

_log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048
_SEND_SECONDS = 5.0
_CLOSE_SECONDS = 0.2
"""Seconds for connections to close at the end, when there are no replies left to wait for."""
_CLIENT_LOGGERS = (
    "uvicorn.error",
    "streamserve.api.http.connection",
    "streamserve.api.http.connection_limits",
)
"""Loggers whose lines are caused by clients."""


class BindError(OSError):
    """An address on which the server cannot listen. The message is one line for the operator."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port` (0: any free one). Raises BindError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BindError(f"cannot listen on {host}: {error.strerror}") from error
    family, kind, protocol, _, address = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise BindError(_reason(host, port, error)) from error
    return sock


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use: choose another with --port"
    return f"cannot listen on port {port} of {host}: {os.strerror(error.errno or 0)}"


async def serve(
    app: Starlette,
    sock: socket.socket,
    *,
    timeouts: Timeouts | None = None,
    grace_seconds: float = 30.0,
    max_message_bytes: int = 8 << 20,
    limits: ConnectionLimits | None = None,
    tls: ssl.SSLContext | None = None,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve `app` on a socket from `bind` until SIGINT, SIGTERM or SIGHUP, or until this call is cancelled.

    The first signal drains: new requests get 503, open ones have `grace_seconds` to finish. A second signal
    ends them at once. `stopping` is called at the first signal. Returns normally, so that the caller can
    clean up; the event loop belongs to the caller.

    - `max_message_bytes`: the maximum size of a WebSocket message.
    - `limits`: limits of connections; the file descriptors that the app leaves for them also limit them.
    - `tls`: if given, connections are HTTPS.
    """
    connections = Connections(limits or ConnectionLimits(), app.state.descriptors)
    config = _config(app, timeouts or Timeouts(), connections, max_message_bytes, tls)
    server = _Server(config, app.state.drain, grace_seconds, stopping, (timeouts or Timeouts()).read)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        with throttled(*_CLIENT_LOGGERS):
            await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def _config(
    app: Starlette,
    timeouts: Timeouts,
    connections: Connections,
    max_message_bytes: int,
    tls: ssl.SSLContext | None,
) -> uvicorn.Config:
    """Return uvicorn's configuration with this package's protocol classes."""
    slices = Slices()
    socket_protocol = partial(SocketProtocol, app.state.memory, timeouts.read, connections, slices)
    return uvicorn.Config(
        app,
        http=partial(HttpConnection, timeouts, connections, slices),  # type: ignore[arg-type]
        ws=socket_protocol,  # type: ignore[arg-type]
        ws_max_size=max_message_bytes,
        ws_per_message_deflate=False,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        backlog=_BACKLOG,
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, except that signals drain before they stop it.

    uvicorn would also raise the signals again at its end: they would end the process before its cleanup.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: RequestGate,
        grace_seconds: float,
        stopping: Callable[[], None],
        handshake_seconds: float,
    ) -> None:
        config.timeout_graceful_shutdown = math.ceil(grace_seconds)
        super().__init__(config)
        self._drain = drain
        self._grace_seconds = grace_seconds
        self._stopping = stopping
        self._handshake_seconds = handshake_seconds
        self._draining: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = stop_signals()
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is None:
            self._stopping()
            _log.info(self._farewell())
            self._drain.begin(self._grace_seconds)
            self._draining = asyncio.get_running_loop().create_task(self._drain_and_end())
        else:
            _log.info("stopping at once, without waiting for open requests")
            self._end(_CLOSE_SECONDS)
            for task in self.server_state.tasks:
                task.cancel()

    def _farewell(self) -> str:
        """Return the line that says what the server waits for."""
        if not self._drain.open:
            return "draining: no request is open"
        requests = "1 open request has" if self._drain.open == 1 else f"{self._drain.open} open requests have"
        return (
            f"draining: {requests} {self._grace_seconds:g} seconds to finish; "
            "a second signal (Ctrl-C) ends them now"
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        context = self.config.ssl
        if context is None or not sockets:
            await super().startup(sockets)
            return
        await super().startup([])  # uvicorn accepts nothing

        def new() -> HttpConnection:
            connection: HttpConnection = self.config.http_protocol_class(  # type: ignore[assignment, call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return connection

        self.servers = [
            TlsListener(sock, context, new, self._handshake_seconds)  # type: ignore[misc]
            for sock in sockets
        ]

    async def _drain_and_end(self) -> None:
        """Wait for open requests, at most for the grace period, then for replies that are still being
        sent."""
        try:
            await asyncio.wait_for(self._drain.idle(), self._grace_seconds)
        except TimeoutError:
            self._end(_CLOSE_SECONDS)
        else:
            self._end(min(self._grace_seconds, _SEND_SECONDS))

    def _end(self, seconds: float) -> None:
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment]
        self.should_exit = True
