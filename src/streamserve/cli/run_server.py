"""Runs the HTTP server over an AsyncLLM, from the bound port to the last request."""

import logging
import socket
import time

import uvloop

from streamserve import __version__
from streamserve.api.app import create_app
from streamserve.api.http.process_memory import bound_allocator, bound_switching
from streamserve.api.http.server import bind
from streamserve.cli.announce import announce
from streamserve.cli.notify import STOPPING, notify
from streamserve.cli.run_on_demand import serve_on_demand
from streamserve.cli.serving import (
    api_settings,
    example,
    is_local_only,
    is_loopback,
    serve_until_stopped,
    threads_of,
    url_of,
    warn_of_threads,
)
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.messages import ModelInfo, Ready
from streamserve.settings.options import Settings
from streamserve.settings.resolve import topology
from streamserve.settings.several import ServedModels
from streamserve.system.logs import configure_logging
from streamserve.system.processors import usable_processors

_log = logging.getLogger(__name__)


def run(served: ServedModels) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises OSError if the address is in use, CheckpointError or StartError if the model cannot be served,
    FleetError if the server failed at run time.
    """
    server = served.first.server
    configure_logging(server.log_level, server.log_format, access_log=server.access_log)
    with bind(server.host, server.port) as listener:
        if not (server.api_key or is_loopback(listener)):
            _log.warning("anyone who can reach %s may use this server: set --api-key-file", server.host)
        if served.on_demand:
            uvloop.run(serve_on_demand(served, listener))
        else:
            uvloop.run(_serve(served.first, listener))


async def _serve(settings: Settings, listener: socket.socket) -> None:
    bound_allocator()
    bound_switching()
    llm = AsyncLLM(settings)
    api = api_settings(settings, is_local_only(settings.server, listener))
    announce(f"streamserve {__version__}: loading {settings.name} …")
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


def welcome(llm: AsyncLLM, settings: Settings, listener: socket.socket, seconds: float) -> str:
    """Return the text to print when a server is ready. `seconds` is the time that this took.

    It shows the model, the memory, the URL and an example command.
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
    """Return a line with the model's notice for users; "" without one."""
    return f"\n  notice    {model.notice}" if model.notice else ""


def adapters_of(llm: AsyncLLM) -> str:
    """Return a line with the names of the LoRA adapters; "" without adapters."""
    return f"\n  adapters  {', '.join(llm.adapters)}" if llm.adapters else ""


def memory_to_swap(settings: Settings, ready: Ready) -> str:
    """Return a line with the limit of host memory for swapped KV; "" if there is none."""
    if not ready.swap_bytes:
        return ""
    workers = len(topology(settings.server).names)
    each = f" in each of {workers} workers" if workers > 1 else ""
    return f"\n  swap      up to {ready.swap_bytes / 1e6:.0f} MB for evicted KV{each}"


def memory_together(settings: Settings, ready: Ready) -> str:
    """Return the memory of all workers together; "" if there is only one."""
    workers, weights = len(topology(settings.server).names), ready.model.weight_bytes
    if workers == 1:
        return ""
    total = workers * ready.kv_cache_bytes + weights * (1 if ready.weights_shared else workers)
    each = ", the KV cache" if ready.weights_shared else ""
    return f"{each} in each of {workers} workers: {total / 1e6:.0f} MB together"


def _processors(settings: Settings) -> str:
    """Return the total number of threads of all workers, and the processors that they run on."""
    usable, threads = usable_processors(), threads_of(settings)
    more = f", of which {usable.threads} run at the same time" if threads > usable.threads else ""
    return f": {threads} threads{more} on {usable}"
