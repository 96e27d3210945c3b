"""Computes the memory of several models in a process that imports torch and then ends."""

import asyncio
import os
from collections.abc import Sequence

import msgspec

from streamserve.fleet.child_process import start_program
from streamserve.fleet.worker_process import worker_environment
from streamserve.llm.async_llm import threads_of_worker
from streamserve.protocol.errors import CheckpointError, StartError
from streamserve.protocol.fork import Program
from streamserve.protocol.model_memory import MemoryPlan, MemoryRequest, PlannedModel, PlanRefused
from streamserve.settings.options import Settings
from streamserve.settings.resolve import worker_bound
from streamserve.settings.several import served_names


async def plan_memory(models: Sequence[Settings], budget: int | None) -> MemoryPlan:
    """Return the memory of each model within a `budget` in bytes (None: derived from the machine's memory).

    Raises CheckpointError naming a model that cannot be served within it, StartError if the process fails.
    """
    request = MemoryRequest(tuple(_planned(settings) for settings in models), budget)
    status, output = await _run("memory_plan", msgspec.msgpack.encode(request))
    if status:
        raise StartError(f"the memory of the models could not be planned: exit status {status}")
    answer: MemoryPlan | PlanRefused = msgspec.msgpack.decode(output, type=MemoryPlan | PlanRefused)
    if isinstance(answer, PlanRefused):
        raise CheckpointError(answer.error)
    return answer


async def _run(program: Program, request: bytes) -> tuple[int | None, bytes]:
    """Run a program with a request as its input; return its exit status and output."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        try:
            process = await start_program(program, "", worker_environment(), stdout=writing)
        finally:
            os.close(writing)
        process.write(request)
        process.close_input()
        try:
            output = await asyncio.to_thread(pipe.read)
        except BaseException:
            process.kill()
            raise
        return await process.wait(), output


def _planned(settings: Settings) -> PlannedModel:
    workers = worker_bound(settings.server)
    config = msgspec.structs.replace(settings.model, threads=threads_of_worker(settings.model, workers))
    return PlannedModel(served_names(settings)[0], config, workers)


def with_planned_pool(settings: Settings, num_blocks: int) -> Settings:
    """Return settings with a KV cache of the planned size. A host pool exists only if the settings ask for
    one: by default, it would take memory of another model."""
    swap_space = settings.model.swap_space or 0.0
    model = msgspec.structs.replace(
        settings.model, num_blocks=num_blocks, kv_cache_bytes=None, swap_space=swap_space
    )
    return Settings(settings.name, model, settings.server)
