"""The effect of settings in virtual time: everything that clients receive from workers with these settings,
and when, under a workload that exercises every setting of engine and fleet."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import Drafter
from streamserve.execution.compute.memory import size_pool, size_swap
from streamserve.execution.loading.loaded import PoolSizes, engine_config
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Open
from streamserve.llm.async_llm import fleet_config, worker_model
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.draft_kind import DraftKind, draft_kind
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.settings.options import Settings
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import expected, model_info
from tests.simulate.lifecycle import RandomDrafter

POSITIONS = 256
TOKEN_BYTES = 64 << 10
"""KV bytes of a token. The number is large, so that a small part of a real machine's memory is also small
here."""
FREE_BYTES = 60 * 16 * TOKEN_BYTES
UNTIL = 15.0


def observed(settings: Settings) -> list[tuple[float, str]]:
    """Return what clients receive from a server with these settings, and when; and the counters of its
    workers."""
    simulation = Simulation(fleet_config(settings), specs(settings))
    for at, event in workload():
        simulation.at(at, event)
    simulation.schedule_ticks()
    events = [(round(item.time, 9), repr(item.message)) for item in simulation.run(until=UNTIL)]
    assert sum("Token(" in text for _, text in events) > 0, "the workload is served"
    reports = [worker.engine.report() for worker in simulation.workers.values()]
    return [*events, (UNTIL, repr([(r.preemptions, r.prefix_hits, r.evictions) for r in reports]))]


def specs(settings: Settings) -> dict[Any, WorkerSpec]:
    """Return the specifications of the workers of each role."""
    fleet = fleet_config(settings)
    return {role: _spec(settings, name, fleet) for role, name in _one_of_each_role(fleet)}


def _one_of_each_role(fleet: FleetConfig) -> Iterator[tuple[str, str]]:
    for role in ("unified", "prefill", "decode"):
        for name in getattr(fleet.topology, role)[:1]:
            yield role, name


def _spec(settings: Settings, name: str, fleet: FleetConfig) -> WorkerSpec:
    model = worker_model(settings, name)
    rate = settings.server.kv_bytes_per_second
    return WorkerSpec(
        engine(model),
        model_info(POSITIONS),
        lambda tokens, context: 0.01 + 0.001 * tokens + 1e-6 * context if tokens else 0.0,
        wire_seconds=model.block_size * TOKEN_BYTES / rate if rate else 1e-5,
        policy=model.speculation_policy,
        drafter=drafter(model),
        groups=2 if (draft_kind(model.draft) is DraftKind.MODEL) else 1,
    )


def engine(model: ModelConfig) -> EngineConfig:
    """Return the limits of an engine on a machine with little memory."""
    block = model.block_size * TOKEN_BYTES
    blocks, length = size_pool(model, block, POSITIONS, FREE_BYTES)
    return engine_config(model, PoolSizes(blocks, block, 0, size_swap(model, block, FREE_BYTES), length))


def drafter(model: ModelConfig) -> Callable[[CostExecutor], Drafter] | None:
    """Return the simulated drafter for the value of the setting `draft`: a draft model has KV."""
    if draft_kind(model.draft) is DraftKind.NONE:
        return None
    accuracy = random.Random(model.draft).uniform(0.6, 0.9)
    if draft_kind(model.draft) is DraftKind.MODEL:
        return partial(SimulatedDrafter, accuracy=accuracy)
    return RandomDrafter


def workload() -> Iterator[tuple[float, Open | ClientEdit]]:
    """Yield events: prompts that share a prefix, chats of two turns, infeasible latency targets, several
    choices, priorities, and prompt streams; together they need more memory than there is."""
    rng = random.Random(7)
    shared = [rng.randrange(90) for _ in range(60)]
    for number in range(16):
        own = [rng.randrange(90) for _ in range(rng.randint(5, 110))]
        slo = (Slo(), Slo(tpot_ms=12.0, ttft_ms=30.0), Slo(tpot_ms=40.0))[number % 3]
        params = SamplingParams(
            seed=number, temperature=number % 2, max_tokens=24, n=1 + (number % 8 == 5), slo=slo
        )
        prompt, at = (shared if number % 2 else []) + own, 1.1 + 0.03 * number
        if number % 6 == 4:
            yield at, Open(f"r{number}", prompt[:20], params, open=True)
            yield at + 0.2, ClientEdit(f"r{number}", 1, 20, prompt[20:], finish=True)
            continue
        yield at, Open(f"r{number}", prompt, params, priority=number % 5 == 0)
        if number % 4 == 0 and params.n == 1:
            again = prompt + expected(prompt, params, 0, POSITIONS) + own[:9]
            yield at + 4.0, Open(f"r{number}-again", again, params)
