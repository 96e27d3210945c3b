"""Ask for the memory of several models in a process that loads torch and ends."""

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from streamserve.fleet.worker_process import worker_environment
from streamserve.llm.async_llm import threads_of_worker
from streamserve.protocol.errors import CheckpointError, StartError
from streamserve.protocol.model_memory import MemoryPlan, MemoryRequest, PlannedModel, PlanRefused
from streamserve.settings.options import Settings
from streamserve.settings.resolve import worker_bound
from streamserve.settings.several import served_names


async def plan_memory(models: Sequence[Settings], budget: int | None) -> MemoryPlan:
    """Return the memory of each of the models in a `budget` of bytes (None: derived from the machine's).

    Raises CheckpointError naming the model that cannot be served in it, StartError if the process fails.
    """
    request = MemoryRequest(tuple(_planned(settings) for settings in models), budget)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "streamserve.workers.memory_plan",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=worker_environment(),
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate(msgspec.msgpack.encode(request))
    except BaseException:
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise StartError(f"the memory of the models could not be planned: exit status {process.returncode}")
    answer: MemoryPlan | PlanRefused = msgspec.msgpack.decode(output, type=MemoryPlan | PlanRefused)
    if isinstance(answer, PlanRefused):
        raise CheckpointError(answer.error)
    return answer


def _planned(settings: Settings) -> PlannedModel:
    workers = worker_bound(settings.server)
    config = msgspec.structs.replace(settings.model, threads=threads_of_worker(settings.model, workers))
    return PlannedModel(served_names(settings)[0], config, workers)


def with_planned_pool(settings: Settings, num_blocks: int) -> Settings:
    """Return settings with a KV cache of the planned size, and no host pool that was not asked for: its
    memory would be another model's."""
    swap_space = settings.model.swap_space or 0.0
    model = msgspec.structs.replace(
        settings.model, num_blocks=num_blocks, kv_cache_bytes=None, swap_space=swap_space
    )
    return Settings(settings.name, model, settings.server)
