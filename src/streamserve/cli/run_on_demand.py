"""Runs the HTTP server over models that are loaded on demand."""

import socket
import time

from streamserve import __version__
from streamserve.api.app import OnDemand, create_app_on_demand
from streamserve.api.http.process_memory import bound_allocator, bound_switching
from streamserve.cli.announce import announce
from streamserve.cli.notify import STOPPING, notify
from streamserve.cli.serving import (
    api_settings,
    example,
    is_local_only,
    serve_until_stopped,
    url_of,
    warn_of_threads,
)
from streamserve.llm.async_llm import AsyncLLM
from streamserve.llm.memory_plan import plan_memory, with_planned_pool
from streamserve.llm.model_pool import LOAD_TIMEOUT, MEMORY_TIMEOUT, ModelPool, PooledModel
from streamserve.protocol.model_memory import MemoryPlan
from streamserve.settings.several import ServedModels, served_names


def loading_line(served: ServedModels) -> str:
    """Return the first line of the output: the model that is being loaded, and those that requests load."""
    first, *others = (served_names(settings)[0] for settings in served.models)
    on_demand = f"; on demand: {', '.join(others)}" if others else ""
    return f"streamserve {__version__}: loading {first} …{on_demand}"


async def serve_on_demand(served: ServedModels, listener: socket.socket) -> None:
    """Serve models within a memory budget until a signal. The first model is loaded at the start.

    Raises CheckpointError or StartError if a model does not fit the budget, or if the first model cannot be
    loaded.
    """
    bound_allocator()
    bound_switching()
    server = served.first.server
    announce(loading_line(served))
    for settings in served.models:
        warn_of_threads(settings)
    started = time.monotonic()
    plan = await plan_memory(served.models, server.models_memory_bytes)
    llms = [
        AsyncLLM(with_planned_pool(settings, memory.num_blocks))
        for settings, memory in zip(served.models, plan.models, strict=True)
    ]
    pool, local_only = _pool(llms, plan), is_local_only(server, listener)
    models = {
        llm.served_names[0]: OnDemand(llm, api_settings(llm.settings, local_only), memory.max_model_len)
        for llm, memory in zip(llms, plan.models, strict=True)
    }
    try:
        await serve_until_stopped(
            create_app_on_demand(models, pool),
            server,
            listener,
            pool.load(next(iter(models))),
            pool.until_failed(),
            lambda: _welcome(llms, plan, url_of(server, listener), time.monotonic() - started),
        )
    finally:
        notify(STOPPING)
        await pool.close()


def _pool(llms: list[AsyncLLM], plan: MemoryPlan) -> ModelPool:
    """Return the pool of the models, with the memory of each."""
    server = llms[0].settings.server
    pooled = [
        PooledModel(llm.served_names[0], llm, memory.total, llm.settings.server.idle_unload)
        for llm, memory in zip(llms, plan.models, strict=True)
    ]
    return ModelPool(
        pooled,
        plan.budget,
        LOAD_TIMEOUT if server.load_timeout is None else server.load_timeout,
        MEMORY_TIMEOUT if server.memory_timeout is None else server.memory_timeout,
        server.max_requests,
    )


def _welcome(llms: list[AsyncLLM], plan: MemoryPlan, url: str, seconds: float) -> str:
    """Return the text to print when the first model is loaded. `seconds` is the time that this took."""
    lines = [
        f"{', '.join(llm.served_names)}: {memory.weights / 1e6:.1f} MB weights, "
        f"{memory.kv_cache / 1e6:.0f} MB KV cache, {memory.max_model_len} tokens of context{_adapters(llm)}"
        for llm, memory in zip(llms, plan.models, strict=True)
    ]
    together = sum(memory.total for memory in plan.models)
    fits = "all fit" if together <= plan.budget else f"all together need {together / 1e6:.0f} MB"
    models = "\n            ".join(lines)
    return f"""
  models    {models}
  memory    {plan.budget / 1e6:.0f} MB for the models that are loaded at the same time: {fits}
  ready     in {seconds:.1f} s at {url}

  Try it:

    {example(llms[0], url)}
"""


def _adapters(llm: AsyncLLM) -> str:
    """Return the names of a model's LoRA adapters as a further part of its line; "" without adapters."""
    return f"; adapters: {', '.join(llm.adapters)}" if llm.adapters else ""
