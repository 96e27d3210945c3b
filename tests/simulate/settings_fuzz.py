"""One simulated server with random settings under a random workload: a trial of the settings campaign.

Every field of EngineConfig and FleetConfig is drawn; one without a generator here fails the test that looks
for it. The drafter has its own KV, or none, or there is none; workers die; requests are cancelled.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.routers import parse_router
from streamserve.baselines.speculation import NAMES
from streamserve.engine.plan import Drafter
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Close, Deliver, Edit, Open, Refuse
from streamserve.fleet.worker_state import pairs, pools, unified
from streamserve.protocol.config import EngineConfig, Eviction
from streamserve.protocol.messages import Finished, Token, Withdrawn
from streamserve.protocol.sampling import SamplingParams, Slo, SpeculationLimits
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.simulation import ClientEvent, Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import assert_engine_empty, expected, model_info
from tests.simulate.test_lifecycle_events import RandomDrafter

MAX_MODEL_LEN = 96
MAX_VIRTUAL_SECONDS = 2000.0
"""Virtual seconds after which an unfinished request counts as hung."""
POLICIES = (*NAMES, "fixed:1", "fixed:8", "fixed-tree:2x3", "fixed-tree:4x2")
ROUTERS = (
    "flowguard", "flowguard-as-published", "predictive", "round-robin", "random", "least-loaded",
    "cache-aware", "classes:20,50",
)  # fmt: skip

Draw = Callable[[random.Random], Any]
ENGINE_FIELDS: dict[str, Draw] = {
    "num_blocks": lambda rng: rng.choice((26, 30, 40, 80, 200)),
    "block_size": lambda rng: rng.choice((1, 2, 4, 4, 8, 16)),
    "max_model_len": lambda rng: MAX_MODEL_LEN,
    "max_num_seqs": lambda rng: rng.choice((3, 4, 8, 16, 64)),
    "max_num_batched_tokens": lambda rng: rng.choice((1, 7, 16, 24, 24, 64, 64, 512)),
    "max_chunk": lambda rng: rng.choice((1, 3, 12, 64, 512)),
    "enable_prefix_caching": lambda rng: rng.random() < 0.8,
    "preempt_every": lambda rng: rng.choice((0, 0, 0, 3, 7)),
    "draft_nodes": lambda rng: rng.choice((1, 4, 32)),
    "order": lambda rng: rng.choice(tuple(ORDERS)),
    "prefill_share": lambda rng: rng.choice((None, None, 0.0, 0.3, 1.0)),
    "eviction": lambda rng: rng.choice(get_args(Eviction)),
    "swap_blocks": lambda rng: rng.choice((0, 8, 200)),
    "slo_admission": lambda rng: rng.random() < 0.2,
    "check": lambda rng: True,
}
FLEET_FIELDS: dict[str, Draw] = {
    "topology": lambda rng: rng.choice(
        (unified(1), unified(1), unified(2), pairs(1), pairs(1), pairs(2), pools(2, 1), pools(1, 2))
    ),
    "router": lambda rng: parse_router(rng.choice(ROUTERS)),
    "max_requests": lambda rng: rng.choice((8, 1024)),
    "max_waiting_tokens": lambda rng: rng.choice((200, 1 << 20)),
    "stuck_after": lambda rng: 30.0,
    "max_attempts": lambda rng: 9,
    "continue_tokens": lambda rng: rng.choice((0, 64)),
    "slo_admission": lambda rng: rng.random() < 0.2,
}


@dataclass(frozen=True)
class SubmittedRequest:
    """A request: its final prompt, and whether it is cancelled."""

    prompt: list[int]
    params: SamplingParams
    cancelled: bool


@dataclass(frozen=True)
class TrialCounts:
    """Counts of the events in a trial."""

    tokens: int = 0
    accepted: int = 0
    preempted: int = 0
    swapped: int = 0
    handed_over: int = 0
    deaths: int = 0
    cancelled: int = 0
    refused: int = 0


def trial(seed: int) -> TrialCounts:
    """Run one simulated server to its end. Raises AssertionError where a text is wrong, a request does not
    end, or something is leaked, and any exception of an engine."""
    rng = random.Random(seed)
    simulation, submitted, cancels = _server(rng)
    received = simulation.run(until=MAX_VIRTUAL_SECONDS)
    return _check(simulation, submitted, cancels, received)


def _server(rng: random.Random) -> tuple[Simulation, dict[str, SubmittedRequest], int]:
    engine = EngineConfig(**{name: draw(rng) for name, draw in ENGINE_FIELDS.items()})
    min_blocks = MAX_MODEL_LEN // engine.block_size + 2
    engine = msgspec.structs.replace(engine, num_blocks=max(engine.num_blocks, min_blocks))
    fleet = FleetConfig(**{name: draw(rng) for name, draw in FLEET_FIELDS.items()})
    make_drafter, groups = _drafter(rng)
    simulation = Simulation(
        fleet,
        WorkerSpec(
            engine,
            model_info(MAX_MODEL_LEN),
            _cost(rng),
            wire_seconds=rng.choice((0.0, 0.003, 0.1)),
            policy=rng.choice(POLICIES),
            drafter=make_drafter,
            groups=groups,
        ),
    )
    submitted: dict[str, SubmittedRequest] = {}
    shared = [rng.randrange(90) for _ in range(40)]
    for number in range(rng.randint(3, 12)):
        _submit(simulation, rng, f"r{number}", shared, submitted, min(3, engine.max_num_seqs))
    cancels = sum(request.cancelled for request in submitted.values())
    for _ in range(rng.choice((0, 0, 1, 3))):
        simulation.kill(rng.uniform(1.1, 5), rng.choice(fleet.topology.names))
    return simulation, submitted, cancels


def _drafter(rng: random.Random) -> tuple[Callable[[CostExecutor], Drafter] | None, int]:
    """Return no drafter, one without KV, or one with a KV cache group; and the number of groups."""
    kind, seed = rng.choice(("none", "plain", "kv", "kv", "kv")), rng.randrange(1 << 30)
    accuracy, late = rng.choice((0.0, 0.5, 0.9, 1.0)), rng.choice((0.0, 0.0, 0.1, 0.5))
    if kind == "none":
        return None, 1
    if kind == "plain":
        return RandomDrafter, 1
    return lambda executor: SimulatedDrafter(executor, accuracy, late, seed=seed), 2


def _cost(rng: random.Random) -> Callable[[int, int], float]:
    start, token_seconds, kv = (
        rng.choice((0.01, 0.05)),
        rng.choice((0.0, 0.0005, 0.003)),
        rng.choice((0.0, 1e-6)),
    )
    return lambda tokens, context: start + tokens * token_seconds + context * kv if tokens else 0.0


def _submit(
    simulation: Simulation,
    rng: random.Random,
    name: str,
    shared: list[int],
    submitted: dict[str, SubmittedRequest],
    max_choices: int,
) -> None:
    """Submit a request, as a stream or at once, and perhaps cancel it."""
    at = 1.1 + rng.uniform(0, 2)
    shared_prefix = shared[: rng.choice((0, 0, 10, 20, 40))]
    prompt = shared_prefix + [rng.randrange(90) for _ in range(rng.randint(1, 45))]
    params = SamplingParams(
        n=min(max_choices, rng.choice((1, 1, 1, 3))),
        seed=rng.randrange(100),
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.choice((1, 2, 5, 12, 40)),
        slo=rng.choice((Slo(), Slo(tpot_ms=30.0), Slo(ttft_ms=200.0, tpot_ms=20.0))),
        speculation=SpeculationLimits(enabled=rng.random() < 0.9),
    )
    streaming = rng.random() < 0.25
    simulation.at(
        at, Open(name, list(prompt), params, rng.choice((0, 0, 1, -1)), open=streaming,
                 answer_early=streaming and rng.random() < 0.4)
    )  # fmt: skip
    version = 0
    while streaming:
        at, version = at + rng.expovariate(4), version + 1
        retained = rng.choice((len(prompt), rng.randint(0, len(prompt))))
        new = [rng.randrange(90) for _ in range(rng.randint(1, 12))]
        prompt = (prompt[:retained] + new)[: MAX_MODEL_LEN - 4]
        streaming = rng.random() < 0.6
        simulation.at(at, Edit(name, version, retained, prompt[retained:], finish=not streaming))
    cancelled = rng.random() < 0.15
    if cancelled:
        simulation.at(at + rng.expovariate(2), Close(name))
    submitted[name] = SubmittedRequest(prompt, params, cancelled)


def _check(
    simulation: Simulation, submitted: dict[str, SubmittedRequest], cancels: int, received: list[ClientEvent]
) -> TrialCounts:
    texts: dict[tuple[str, int], list[int]] = {}
    ended, refused = set(), set()
    for item in received:
        match item.message:
            case Refuse(request=request, error=error):
                assert error.status in (429, 503), f"{request}: {error}"
                refused.add(request)
            case Deliver(request=request, events=events, last=last):
                _append(texts, request, events)
                for event in events:
                    if isinstance(event, Finished) and event.error:
                        assert event.status in (429, 503), f"{request}: {event.error}"
                        refused.add(request)
                ended |= {request} if last else set()
    for name, request in submitted.items():
        if name in refused or request.cancelled:
            continue
        assert name in ended, f"{name} has no end"
        for choice in range(request.params.n):
            assert texts.get((name, choice), []) == expected(
                request.prompt, request.params, choice, MAX_MODEL_LEN
            ), name
    assert not simulation.fleet.requests
    assert not len(simulation.fleet.transfers.reservations)
    reports = []
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
        reports.append(worker.engine.report())
    return TrialCounts(
        tokens=sum(map(len, texts.values())),
        accepted=sum(report.speculation.accepted for report in reports if report.speculation),
        preempted=sum(report.preemptions for report in reports),
        swapped=sum(report.evictions.swaps for report in reports),
        handed_over=sum(report.transfer.handed_over for report in reports if report.transfer),
        deaths=sum(worker.incarnation - 1 for worker in simulation.fleet.workers.values()),
        cancelled=cancels,
        refused=len(refused),
    )


def _append(texts: dict[tuple[str, int], list[int]], request: str, events: list[Any]) -> None:
    for event in events:
        if isinstance(event, Token):
            texts.setdefault((event.request, event.choice), []).append(event.token)
        elif isinstance(event, Withdrawn):
            for key in [key for key in texts if key[0] == request]:
                del texts[key]
