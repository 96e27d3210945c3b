"""The common part of the commands that run the API: settings, the server until a signal, and texts about
it."""

import asyncio
import ipaddress
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette

from streamserve.api.http.connection import Timeouts
from streamserve.api.http.connection_limits import ConnectionLimits
from streamserve.api.http.process_memory import freeze_started
from streamserve.api.http.server import serve
from streamserve.api.settings import ApiSettings
from streamserve.cli.announce import announce
from streamserve.cli.notify import READY, STOPPING, notify
from streamserve.llm.async_llm import AsyncLLM, threads_of_worker
from streamserve.settings.options import Settings
from streamserve.settings.resolve import worker_bound
from streamserve.settings.sampling import recommended_sampling
from streamserve.settings.server_config import ServerConfig
from streamserve.system.processors import usable_processors
from streamserve.system.tls import tls_context

_log = logging.getLogger(__name__)


async def serve_until_stopped(
    app: Starlette,
    server: ServerConfig,
    listener: socket.socket,
    loading: Coroutine[Any, Any, None],
    failing: Coroutine[Any, Any, None],
    welcome_text: Callable[[], str],
) -> None:
    """Serve `app` until a signal, and print `welcome_text` when `loading` has ended.

    Raises any error of `loading`, and the error with which `failing` ends.
    """
    serving_task = asyncio.create_task(
        serve(
            app,
            listener,
            tls=tls_context(server.ssl_certfile, server.ssl_keyfile) if server.ssl_certfile else None,
            stopping=lambda: notify(STOPPING),
            **connection_settings(server),
        )
    )
    loading_task, failing_task = asyncio.create_task(loading), asyncio.create_task(failing)
    try:
        await asyncio.wait({serving_task, loading_task}, return_when=asyncio.FIRST_COMPLETED)
        if loading_task.done():
            await loading_task  # raises the error if the model cannot be loaded
            freeze_started()
            announce(welcome_text())
            notify(READY)
            await asyncio.wait({serving_task, failing_task}, return_when=asyncio.FIRST_COMPLETED)
            await (failing_task if failing_task.done() else serving_task)
    finally:
        for task in (loading_task, failing_task, serving_task):
            task.cancel()
        await asyncio.gather(loading_task, failing_task, serving_task, return_exceptions=True)


def connection_settings(server: ServerConfig) -> dict[str, Any]:
    """Return the arguments of `serve` that limit the time and the number of connections."""
    return {
        "timeouts": Timeouts(server.read_timeout, server.write_timeout),
        "grace_seconds": server.drain_timeout,
        "max_message_bytes": server.max_body_bytes,
        "limits": ConnectionLimits(server.max_connections, server.max_connections_per_address),
    }


def api_settings(settings: Settings, local_only: bool) -> ApiSettings:
    """Return the operator's settings of the API."""
    return ApiSettings(
        **msgspec.structs.asdict(settings.server),
        default_sampling=recommended_sampling(Path(settings.model.path)),
        local_only=local_only,
        worker_bound=worker_bound(settings.server),
    )


def is_local_only(server: ServerConfig, listener: socket.socket) -> bool:
    """Return whether only this machine can reach the server, and the server requires no key."""
    return is_loopback(listener) and not server.api_key


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(server: ServerConfig, listener: socket.socket) -> str:
    """Return the address of the server."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{'[' + host + ']' if ':' in host else host}:{port}"


def threads_of(settings: Settings) -> int:
    """Return the total number of threads of all workers."""
    workers = worker_bound(settings.server)
    return workers * threads_of_worker(settings.model, workers)


def warn_of_threads(settings: Settings) -> None:
    """Warn if the settings ask for more threads than can run at the same time: each step would wait for the
    last thread."""
    threads, usable = threads_of(settings), usable_processors()
    if settings.model.threads and threads > usable.threads:
        _log.warning(
            "--threads gives all workers %d threads together, of which only %d run at the same time",
            threads,
            usable.threads,
        )


def example(llm: AsyncLLM, url: str) -> str:
    """Return an example request: for an embedding or a score if that is the model's task; otherwise for a
    streamed chat or, if the model has no chat template, a streamed completion."""
    body: dict[str, Any] = {"model": llm.served_names[0]}
    if llm.task == "generate":
        body["stream"] = True
    if llm.task == "embed":
        route, body["input"] = "embeddings", "Once upon a time"
    elif llm.task == "score":
        route, body["query"], body["documents"] = "rerank", "What is a pier?", ["A pier is a landing place."]
    elif llm.chat_template:
        route, body["messages"] = "chat/completions", [{"role": "user", "content": "What is 12 + 7?"}]
    else:
        route, body["prompt"], body["max_tokens"] = "completions", "Once upon a time", 32
    server = llm.settings.server
    key = "-H 'Authorization: Bearer KEY' " if server.api_key else ""
    insecure = "k" if server.ssl_certfile else ""  # the certificate need not be valid for this address
    return (
        f"curl -N{insecure} {url}/v1/{route} {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
