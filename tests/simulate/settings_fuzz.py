"""One simulated server with random settings under a random workload: a trial of the settings campaign, and a
row of the combination matrix.

Every field of EngineConfig and FleetConfig is drawn; one without a generator here fails the test that looks
for it. There is no drafter, a drafter without KV, with its own KV or on the target's KV, or a draft service.
Workers die, and requests are cancelled.
"""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import msgspec

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.routers import parse_router
from streamserve.baselines.speculation import NAMES
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import TARGET, Drafter
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Close, Deliver, Open, Refuse
from streamserve.fleet.worker_state import mixed, pairs, pools, unified
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.config import Eviction
from streamserve.protocol.messages import Finished, OutputWithdrawn, Token
from streamserve.protocol.sampling import SamplingParams, Slo, SpeculationLimits
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.simulation import ClientEvent, Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.draft_service.simulated import ServiceDrafter
from tests.engine.drive import assert_engine_empty, expected, model_info
from tests.simulate.lifecycle import RandomDrafter

MAX_MODEL_LEN = 96
MAX_VIRTUAL_SECONDS = 2000.0
"""Virtual seconds after which an unfinished request counts as hung."""
FIRST_LOOK = 20.0
"""Virtual seconds after which all clients have sent everything, except clients that still wait."""
POLICIES = (*NAMES, "fixed:1", "fixed:8", "fixed-tree:2x3", "fixed-tree:4x2")
ROUTERS = (
    "flowguard", "flowguard-as-published", "predictive", "round-robin", "random", "least-loaded",
    "cache-aware", "classes:20,50",
)  # fmt: skip

ADAPTERS = tuple(Adapter(name, f"/adapters/{name}", f"hash of {name}") for name in ("a", "b"))

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
        (
            unified(1),
            unified(1),
            unified(2),
            pairs(1),
            pairs(1),
            pairs(2),
            pools(2, 1),
            pools(1, 2),
            mixed(1, 1, 1),
            mixed(2, 1, 2),
        )
    ),
    "router": lambda rng: parse_router(rng.choice(ROUTERS)),
    "max_requests": lambda rng: rng.choice((8, 1024)),
    "max_waiting_tokens": lambda rng: rng.choice((200, 1 << 20)),
    "stuck_after": lambda rng: 30.0,
    "max_attempts": lambda rng: 9,
    "max_workers": lambda rng: rng.choice((0, 8)),
    "continue_tokens": lambda rng: rng.choice((0, 64)),
    "adapters": lambda rng: rng.choice(((), (), ADAPTERS)),
    "slo_admission": lambda rng: rng.random() < 0.2,
}


OTHER_FIELDS: dict[str, Draw] = {
    "policy": lambda rng: rng.choice(POLICIES),
    "drafter": lambda rng: rng.choice(("none", "plain", "self", "kv", "kv", "kv", "service", "services")),
    "accuracy": lambda rng: rng.choice((0.0, 0.5, 0.9, 1.0)),
    "late": lambda rng: rng.choice((0.0, 0.0, 0.1, 0.5)),
    "wire_seconds": lambda rng: rng.choice((0.0, 0.003, 0.1)),
    "requests": lambda rng: rng.randint(3, 12),
    "deaths": lambda rng: rng.choice((0, 0, 1, 3)),
    "streaming": lambda rng: 0.25,
    "early": lambda rng: 0.4,
    "appending": lambda rng: 0.5,
    "targets": lambda rng: 0.67,
    "cancelling": lambda rng: 0.15,
}
"""Further properties of a trial: `streaming` is the share of prompt streams, of which `early` are answered
early; `appending` is the share of their edits that only append; `targets` is the share of requests with
latency targets."""
IDLE_FIELDS: dict[str, Draw] = {"idle": lambda rng: rng.choice((0, 4, 24))}
"""The number of idle prompt streams. It is drawn separately, so that the other draws of a seed stay the
same."""


@dataclass(frozen=True)
class SubmittedRequest:
    """A request: its final prompt, its LoRA adapter, and whether it is cancelled."""

    prompt: list[int]
    params: SamplingParams
    cancelled: bool
    adapter: str


@dataclass(frozen=True)
class TrialCounts:
    """Counts of the events in a trial."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    swapped: int = 0
    handed_over: int = 0
    deaths: int = 0
    cancelled: int = 0
    refused: int = 0
    edits: int = 0
    withdrawn: int = 0
    choices: int = 0
    adapted: int = 0
    """Number of tokens of requests with a LoRA adapter."""
    served_trees: int = 0
    read_ahead: int = 0
    shared_trees: int = 0
    """Number of trees from draft services, of tokens that services read before a tree was requested, and with
    two services, of trees from the service that sent fewer."""


def trial(seed: int, fixed: Mapping[str, Any] | None = None) -> TrialCounts:
    """Run one simulated server to its end. The properties in `fixed` (by the names of the tables here) are
    given, and all others are drawn. Raises AssertionError if a text is wrong, a request does not end, or
    something is leaked; and any exception of an engine."""
    rng = random.Random(seed)
    idle = random.Random(f"idle {seed}")
    drawn = {name: draw(idle) for name, draw in IDLE_FIELDS.items()} | dict(fixed or {})
    others = {name: value for name, value in drawn.items() if name not in IDLE_FIELDS}
    simulation, submitted, services = _server(rng, others)
    names = [f"idle{number}" for number in range(drawn["idle"])]
    for name in names:
        _open_idle(simulation, idle, name)
    received = _run(simulation, names)
    return _check(simulation, submitted, services, received)


def _server(
    rng: random.Random, fixed: Mapping[str, Any]
) -> tuple[Simulation, dict[str, SubmittedRequest], list[ServiceDrafter]]:
    tables = {**ENGINE_FIELDS, **FLEET_FIELDS, **OTHER_FIELDS}
    assert fixed.keys() <= tables.keys(), fixed.keys() - tables.keys()
    drawn = {name: draw(rng) for name, draw in tables.items()} | fixed
    engine = EngineConfig(**{name: drawn[name] for name in ENGINE_FIELDS})
    min_blocks = MAX_MODEL_LEN // engine.block_size + 2
    engine = msgspec.structs.replace(engine, num_blocks=max(engine.num_blocks, min_blocks))
    fleet = FleetConfig(**{name: drawn[name] for name in FLEET_FIELDS})
    services: list[ServiceDrafter] = []
    simulation = Simulation(
        fleet,
        WorkerSpec(
            engine,
            model_info(MAX_MODEL_LEN),
            _cost(rng),
            wire_seconds=drawn["wire_seconds"],
            policy=drawn["policy"],
            drafter=_drafter(drawn, rng.randrange(1 << 30), services),
            groups=2 if drawn["drafter"] == "kv" else 1,
        ),
    )
    submitted: dict[str, SubmittedRequest] = {}
    shared = [rng.randrange(90) for _ in range(40)]
    for number in range(drawn["requests"]):
        _submit(simulation, rng, f"r{number}", shared, submitted, min(3, engine.max_num_seqs), drawn)
    for _ in range(drawn["deaths"]):
        simulation.kill(rng.uniform(1.1, 5), rng.choice(fleet.topology.names))
    return simulation, submitted, services


def _drafter(
    drawn: Mapping[str, Any], seed: int, services: list[ServiceDrafter]
) -> Callable[[CostExecutor], Drafter] | None:
    """Return no drafter, or a drafter without KV, on the target's KV or with its own KV, or a client of draft
    services, which are added to `services`."""
    accuracy, late = drawn["accuracy"], drawn["late"]

    def of_services(executor: CostExecutor, count: int) -> ServiceDrafter:
        services.append(ServiceDrafter(executor, accuracy, late, seed + len(services), count))
        return services[-1]

    kinds: dict[str, Callable[[CostExecutor], Drafter] | None] = {
        "none": None,
        "plain": RandomDrafter,
        "self": partial(SimulatedDrafter, accuracy=accuracy, late=late, seed=seed, group=TARGET),
        "kv": partial(SimulatedDrafter, accuracy=accuracy, late=late, seed=seed),
        "service": partial(of_services, count=1),
        "services": partial(of_services, count=2),
    }
    return kinds[drawn["drafter"]]


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
    drawn: Mapping[str, Any],
) -> None:
    """Submit a request, as a stream or at once, and sometimes cancel it."""
    at = 1.1 + rng.uniform(0, 2)
    shared_prefix = shared[: rng.choice((0, 0, 10, 20, 40))]
    prompt = shared_prefix + [rng.randrange(90) for _ in range(rng.randint(1, 45))]
    params = SamplingParams(
        n=min(max_choices, rng.choice((1, 1, 1, 3))),
        seed=rng.randrange(100),
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.choice((1, 2, 5, 12, 40)),
        slo=rng.choice((Slo(tpot_ms=30.0), Slo(ttft_ms=200.0, tpot_ms=20.0)))
        if rng.random() < drawn["targets"]
        else Slo(),
        speculation=SpeculationLimits(enabled=rng.random() < 0.9),
    )
    streaming = rng.random() < drawn["streaming"]
    names = ("", *simulation.fleet.adapters.adapters)
    adapter = names[len(submitted) % len(names)]
    simulation.at(
        at, Open(name, list(prompt), params, rng.choice((0, 0, 1, -1)), open=streaming,
                 answer_early=streaming and rng.random() < drawn["early"], adapter=adapter)
    )  # fmt: skip
    version = 0
    while streaming:
        at, version = at + rng.expovariate(4), version + 1
        append = rng.random() < drawn["appending"]
        retained = len(prompt) if append else rng.randint(0, len(prompt))
        new = [rng.randrange(90) for _ in range(rng.randint(1, 12))]
        prompt = (prompt[:retained] + new)[: MAX_MODEL_LEN - 4]
        streaming = rng.random() < 0.6
        simulation.at(at, ClientEdit(name, version, retained, prompt[retained:], finish=not streaming))
    cancelled = rng.random() < drawn["cancelling"]
    if cancelled:
        simulation.at(at + rng.expovariate(2), Close(name))
    submitted[name] = SubmittedRequest(prompt, params, cancelled, adapter)


def _open_idle(simulation: Simulation, rng: random.Random, name: str) -> None:
    """Open a prompt stream that is edited a few times, and then stays idle."""
    prompt = [rng.randrange(90) for _ in range(rng.randint(0, MAX_MODEL_LEN - 4))]
    at = 1.0 + rng.uniform(0, 1)
    params = SamplingParams(n=rng.choice((1, 3)), seed=rng.randrange(100), max_tokens=4)
    opened = Open(
        name, list(prompt), params, rng.choice((-5, 0, 5)), open=True, answer_early=rng.random() < 0.2,
        tail=rng.choice((0, min(3, len(prompt)))),
    )  # fmt: skip
    simulation.at(at, opened)
    for version in range(1, rng.randint(1, 4)):
        at += rng.expovariate(1)
        retained = rng.randint(0, len(prompt))
        added = [rng.randrange(90) for _ in range(rng.randint(0, MAX_MODEL_LEN - 4 - retained))]
        prompt = prompt[:retained] + added
        simulation.at(at, ClientEdit(name, version, retained, added))


def _run(simulation: Simulation, idle: Collection[str]) -> list[ClientEvent]:
    """Run until all other requests have ended while the `idle` prompt streams are open; close the streams;
    run to the end."""
    until = FIRST_LOOK
    simulation.run(until)
    while until < MAX_VIRTUAL_SECONDS and not simulation.fleet.requests.keys() <= set(idle):
        until = min(2 * until, MAX_VIRTUAL_SECONDS)
        simulation.run(until)
    for name in idle:
        simulation.at(simulation.clock.now, Close(name))
    return simulation.run(MAX_VIRTUAL_SECONDS)


def _check(
    simulation: Simulation,
    submitted: dict[str, SubmittedRequest],
    services: list[ServiceDrafter],
    received: list[ClientEvent],
) -> TrialCounts:
    texts: dict[tuple[str, int], list[int]] = {}
    ended, refused, withdrawn = set(), set(), 0
    for item in received:
        match item.message:
            case Refuse(request=request, error=error):
                assert error.status in (429, 503), f"{request}: {error}"
                refused.add(request)
            case Deliver(request=request, events=events, last=last):
                _append(texts, request, events)
                withdrawn += sum(isinstance(event, OutputWithdrawn) for event in events)
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
                request.prompt, request.params, choice, MAX_MODEL_LEN, request.adapter
            ), name
    assert not simulation.fleet.requests
    assert (len(simulation.fleet.dispatcher.waiting), simulation.fleet.dispatcher.waiting.tokens) == (0, 0)
    assert not len(simulation.fleet.transfers.reservations)
    reports = []
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
        reports.append(worker.engine.report())
    return TrialCounts(
        tokens=sum(map(len, texts.values())),
        drafted=sum(report.speculation.drafted for report in reports if report.speculation),
        accepted=sum(report.speculation.accepted for report in reports if report.speculation),
        preempted=sum(report.preemptions for report in reports),
        swapped=sum(report.evictions.swaps for report in reports),
        handed_over=sum(report.transfer.handed_over for report in reports if report.transfer),
        deaths=sum(worker.incarnation - 1 for worker in simulation.fleet.workers.values()),
        cancelled=sum(request.cancelled for request in submitted.values()),
        refused=len(refused),
        edits=sum(report.streams.chunks for report in reports),
        withdrawn=withdrawn,
        choices=sum(choice > 0 for _, choice in texts),
        adapted=sum(
            len(tokens)
            for (name, _), tokens in texts.items()
            if name in submitted and submitted[name].adapter
        ),
        served_trees=sum(service.trees for service in services),
        read_ahead=sum(service.read_ahead for service in services),
        shared_trees=sum(service.shared_trees for service in services),
    )


def _append(texts: dict[tuple[str, int], list[int]], request: str, events: list[Any]) -> None:
    for event in events:
        if isinstance(event, Token):
            texts.setdefault((event.request, event.choice), []).append(event.token)
        elif isinstance(event, OutputWithdrawn):
            for key in [key for key in texts if key[0] == request]:
                del texts[key]
