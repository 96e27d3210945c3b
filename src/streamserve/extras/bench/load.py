"""The load generator: sends requests at their arrival times, with limited concurrency."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from streamserve.extras.bench.client import Target, open_session, send
from streamserve.extras.bench.statistics import Outcome
from streamserve.extras.bench.workloads import WorkloadPrompt


@dataclass(frozen=True)
class Run:
    """The results of a load. `interrupted` is the number of requests that were open or not yet sent when
    Ctrl-C was pressed."""

    outcomes: list[Outcome]
    duration: float
    interrupted: int


async def run_load(
    target: Target,
    prompts: Sequence[WorkloadPrompt],
    arrivals: Sequence[float],
    *,
    api_key: str | None = None,
    max_concurrency: int | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Run:
    """Send `prompts` at `arrivals` (seconds from now, ascending).

    A request that `max_concurrency` delays is timed from when it is sent. Ctrl-C ends the load, and the
    results so far are returned. Raises BenchError if a prompt does not fit the endpoint.
    """
    bodies = [target.body(prompt) for prompt in prompts]
    outcomes: list[Outcome] = []
    semaphore = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    async with open_session(api_key) as session:
        started = time.perf_counter()

        async def send_one(body: bytes, arrival: float) -> None:
            await asyncio.sleep(started + arrival - time.perf_counter())
            async with semaphore:
                outcome = await send(session, target.url, body, started)
            outcomes.append(outcome)
            on_outcome(outcome)

        tasks = [asyncio.create_task(send_one(*pair)) for pair in zip(bodies, arrivals, strict=True)]
        await _all_or_interrupted(tasks)
        duration = time.perf_counter() - started
    return Run(outcomes, duration, interrupted=len(prompts) - len(outcomes))


async def _all_or_interrupted(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all tasks, or until SIGINT. SIGINT cancels the unfinished tasks."""
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    for result in results:
        if isinstance(result, Exception):
            raise result
