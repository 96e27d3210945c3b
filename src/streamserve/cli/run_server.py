"""Run the HTTP server over an AsyncLLM, from the bound port to the last request."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import typer
import uvloop
from starlette.applications import Starlette

from streamserve import __version__
from streamserve.api.app import create_app
from streamserve.api.http.connection import Timeouts
from streamserve.api.http.connection_limits import ConnectionLimits
from streamserve.api.http.process_memory import bound_allocator, bound_switching, freeze_started
from streamserve.api.http.server import bind, serve
from streamserve.api.settings import ApiSettings
from streamserve.cli.notify import READY, STOPPING, notify
from streamserve.llm.async_llm import AsyncLLM, threads_of_worker
from streamserve.protocol.messages import ModelInfo, Ready
from streamserve.settings.options import Settings
from streamserve.settings.resolve import topology, worker_bound
from streamserve.settings.sampling import recommended_sampling
from streamserve.settings.server_config import ServerConfig
from streamserve.settings.several import ServedModels
from streamserve.system.logs import configure_logging
from streamserve.system.processors import usable_processors
from streamserve.system.tls import tls_context

_log = logging.getLogger(__name__)


def run(served: ServedModels) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises OSError if the address is in use, CheckpointError or StartError if the model cannot be served,
    FleetError if the server itself failed.
    """
    server = served.first.server
    configure_logging(server.log_level, server.log_format, access_log=server.access_log)
    with bind(server.host, server.port) as listener:
        if not (server.api_key or is_loopback(listener)):
            _log.warning("anyone who can reach %s may use this server: set --api-key-file", server.host)
        if served.on_demand:
            from streamserve.cli.run_on_demand import serve_on_demand

            uvloop.run(serve_on_demand(served, listener))
        else:
            uvloop.run(_serve(served.first, listener))


async def _serve(settings: Settings, listener: socket.socket) -> None:
    bound_allocator()
    bound_switching()
    llm = AsyncLLM(settings)
    api = api_settings(settings, is_local_only(settings.server, listener))
    typer.echo(f"streamserve {__version__}: loading {settings.name} …")
    warn_of_threads(settings)
    started = time.monotonic()
    await llm.start(wait=False)
    try:
        await serve_until_stopped(
            create_app(llm, api),
            settings.server,
            listener,
            llm.until_ready(),
            llm.until_failed(),
            lambda: welcome(llm, settings, listener, time.monotonic() - started),
        )
    finally:
        notify(STOPPING)
        await llm.close()


async def serve_until_stopped(
    app: Starlette,
    server: ServerConfig,
    listener: socket.socket,
    loading: Coroutine[Any, Any, None],
    failing: Coroutine[Any, Any, None],
    welcome_text: Callable[[], str],
) -> None:
    """Serve `app` until a signal, and print `welcome_text` once `loading` has ended.

    Raises what `loading` raises, and the reason for which `failing` ends.
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
            await loading_task  # raises the reason why the model cannot be loaded
            freeze_started()
            with contextlib.suppress(OSError):  # standard output is closed, or the disk is full
                typer.echo(welcome_text())
            notify(READY)
            await asyncio.wait({serving_task, failing_task}, return_when=asyncio.FIRST_COMPLETED)
            await (failing_task if failing_task.done() else serving_task)
    finally:
        for task in (loading_task, failing_task, serving_task):
            task.cancel()
        await asyncio.gather(loading_task, failing_task, serving_task, return_exceptions=True)


def connection_settings(server: ServerConfig) -> dict[str, Any]:
    """Return the arguments of `serve` that limit connections, in time and in number."""
    return {
        "timeouts": Timeouts(server.read_timeout, server.write_timeout),
        "grace_seconds": server.drain_timeout,
        "max_message_bytes": server.max_body_bytes,
        "limits": ConnectionLimits(server.max_connections, server.max_connections_per_address),
    }


def api_settings(settings: Settings, local_only: bool) -> ApiSettings:
    """Return the operator's settings of the API."""
    server = settings.server
    return ApiSettings(
        default_sampling=recommended_sampling(Path(settings.model.path)),
        max_body_bytes=server.max_body_bytes,
        max_memory_bytes=server.max_memory_bytes,
        max_prompts=server.max_requests,
        request_timeout=server.request_timeout,
        api_keys=server.api_key,
        admin_keys=server.admin_key,
        metrics_keys=server.metrics_key,
        share_prefixes=server.share_prefixes,
        max_requests_per_key=server.max_requests_per_key,
        cors_origins=server.cors_origin,
        tool_parser=server.tool_parser,
        reasoning_parser=server.reasoning_parser,
        local_only=local_only,
        strict_fields=server.strict_fields,
        max_streams=server.max_streams,
        stream_ttl=server.stream_ttl,
        max_stored_responses=server.max_stored_responses,
        max_stored_response_bytes=server.max_stored_response_bytes,
        stored_response_ttl=server.stored_response_ttl,
        batch_folder=server.batch_folder,
        max_batch_file_bytes=server.max_batch_file_bytes,
        max_batch_folder_bytes=server.max_batch_folder_bytes,
        max_batch_requests=server.max_batch_requests,
        batch_concurrency=server.batch_concurrency,
        max_workers=worker_bound(server),
    )


def is_local_only(server: ServerConfig, listener: socket.socket) -> bool:
    """Return whether only this machine can reach a server, and no key protects it."""
    return is_loopback(listener) and not server.api_key


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def welcome(llm: AsyncLLM, settings: Settings, listener: socket.socket, seconds: float) -> str:
    """Return the text to print once a server is ready, after `seconds`.

    It shows the model, memory, URL and an example command.
    """
    ready, model, url = llm.ready, llm.model, url_of(settings.server, listener)
    return f"""
  model     {settings.name}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters, \
{model.precision}
  computed  by {model.backend}{"" if model.backend.startswith("cuda") else _processors(settings)}\
{_notice(model)}
  memory    {model.weight_bytes / 1e6:.1f} MB weights, {ready.kv_cache_bytes / 1e6:.0f} MB KV cache \
({ready.num_blocks} blocks of {ready.block_size} tokens){memory_together(settings, ready)}\
{memory_to_swap(settings, ready)}\
{adapters_of(llm)}
  limits    {model.max_model_len} tokens of context, {settings.model.max_num_seqs} sequences at once
  ready     in {seconds:.1f} s at {url}

  Try it:

    {example(llm, url)}
"""


def _notice(model: ModelInfo) -> str:
    """Return a further line if there is something to know of the model."""
    return f"\n  notice    {model.notice}" if model.notice else ""


def adapters_of(llm: AsyncLLM) -> str:
    """Return a line with the names of the LoRA adapters; empty without any."""
    return f"\n  adapters  {', '.join(llm.adapters)}" if llm.adapters else ""


def url_of(server: ServerConfig, listener: socket.socket) -> str:
    """Return the address of the server."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{'[' + host + ']' if ':' in host else host}:{port}"


def memory_to_swap(settings: Settings, ready: Ready) -> str:
    """Return a line with the host memory that swapped KV may take, if there is any."""
    if not ready.swap_bytes:
        return ""
    workers = len(topology(settings.server).names)
    each = f" in each of {workers} workers" if workers > 1 else ""
    return f"\n  swap      up to {ready.swap_bytes / 1e6:.0f} MB for evicted KV{each}"


def memory_together(settings: Settings, ready: Ready) -> str:
    """Return the memory of all workers together, if there are several."""
    workers, weights = len(topology(settings.server).names), ready.model.weight_bytes
    if workers == 1:
        return ""
    total = workers * ready.kv_cache_bytes + weights * (1 if ready.weights_shared else workers)
    each = ", the KV cache" if ready.weights_shared else ""
    return f"{each} in each of {workers} workers: {total / 1e6:.0f} MB together"


def _threads(settings: Settings) -> int:
    """Return how many threads all workers have together."""
    workers = worker_bound(settings.server)
    return workers * threads_of_worker(settings.model, workers)


def warn_of_threads(settings: Settings) -> None:
    """Warn if more threads are asked for than can run at the same time: steps then wait for the last one."""
    threads, usable = _threads(settings), usable_processors()
    if settings.model.threads and threads > usable.threads:
        _log.warning(
            "--threads gives all workers %d threads together, of which only %d run at the same time",
            threads,
            usable.threads,
        )


def _processors(settings: Settings) -> str:
    """Return how many threads the workers have together, and on what."""
    usable, threads = usable_processors(), _threads(settings)
    more = f", of which {usable.threads} run at the same time" if threads > usable.threads else ""
    return f": {threads} threads{more} on {usable}"


def example(llm: AsyncLLM, url: str) -> str:
    """Return an example request: an embedding or a score where that is the task, else a stream, of a chat if
    the model has a chat template."""
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
    insecure = "k" if server.ssl_certfile else ""  # the certificate is not one for this address
    return (
        f"curl -N{insecure} {url}/v1/{route} {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
