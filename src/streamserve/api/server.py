"""The HTTP server: uvicorn on a socket that was bound before anything slow began."""

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048


class BindError(OSError):
    """An address that can't be listened on; the message is one line for whoever started the server."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port` (0: any free one). Raises BindError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BindError(f"cannot listen on {host}: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise BindError(_reason(host, port, error)) from error
    return bound


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use: choose another with --port"
    return f"cannot listen on port {port} of {host}: {os.strerror(error.errno or 0)}"


async def serve(
    app: FastAPI,
    bound: socket.socket,
    *,
    log_level: str = "warning",
    access_log: bool = False,
    grace_seconds: int = 30,
) -> None:
    """Serve `app` on a socket from `bind` until SIGINT or SIGTERM, or until this is cancelled.

    Requests that run then have `grace_seconds` to end; a second SIGINT ends them at once. Returns normally,
    so that the caller can clean up. The event loop is the caller's.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_level=log_level,
            access_log=access_log,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=grace_seconds,
            backlog=_BACKLOG,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


class _Server(uvicorn.Server):
    """Uvicorn raises a signal that ended it once more, which would end the process before its clean-up."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
