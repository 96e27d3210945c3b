"""Prompt streams on stream pairs: placed by their content, pushed while they arrive, moved at their end, and
answered early by the decode worker. In all cases the text is the answer to the final prompt."""

import random
from collections import Counter
from dataclasses import dataclass, field

from streamserve.baselines.routers import parse_router
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Close, Open
from streamserve.fleet.worker_state import pairs, pools
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.conftest import Scale
from tests.engine.drive import assert_engine_empty, expected, model_info
from tests.simulate.streaming import texts

MAX_MODEL_LEN = 160
MAX_VIRTUAL_SECONDS = 600.0
ROUTERS = ("flowguard", "predictive", "round-robin", "least-loaded", "classes:20,50", "classes:30=1,other=1")
SLOS = (Slo(), Slo(tpot_ms=40.0), Slo(ttft_ms=300.0, tpot_ms=20.0))


@dataclass
class Trial:
    """A simulated server, and the texts that its clients must get."""

    simulation: Simulation
    expected_texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)


def make_trial(seed: int) -> Trial:
    """Return a server with random pools, memory, order and router. Its workers die occasionally."""
    rng = random.Random(seed)
    topology = rng.choice((pairs(1), pairs(2), pools(2, 1), pools(1, 2)))
    engine = EngineConfig(
        num_blocks=rng.choice((42, 50, 80, 200)), block_size=4, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice((4, 8, 16)), max_num_batched_tokens=rng.choice((16, 32, 64)),
        max_chunk=rng.choice((12, 32)), eviction=rng.choice(("recompute", "swap", "cost")),
        swap_blocks=rng.choice((0, 100)), order=rng.choice(("slo", "slo", "fcfs", "stta", "lcas", "arrival")),
        preempt_every=rng.choice((0, 0, 7)), check=True,
    )  # fmt: skip
    drafter = lambda executor: SimulatedDrafter(executor, 0.8, 0.1, seed=seed)  # noqa: E731
    drafts = rng.random() < 0.4
    kills, token_seconds = rng.choice((0, 0, 1, 3)), rng.choice((0.001, 0.004))
    trial = Trial(
        Simulation(
            FleetConfig(topology=topology, max_attempts=9, router=parse_router(rng.choice(ROUTERS))),
            WorkerSpec(
                engine,
                model_info(MAX_MODEL_LEN),
                lambda tokens, context: 0.01 + tokens * token_seconds,
                wire_seconds=rng.choice((0.0, 0.003, 0.02)),
                drafter=drafter if drafts else None,
                groups=2 if drafts else 1,
            ),
        )
    )
    shared = [rng.randrange(90) for _ in range(60)]
    for number in range(10):
        submit(trial, rng, f"r{number}", shared, streaming=number % 4 > 0)
    for _ in range(kills):
        trial.simulation.kill(rng.uniform(1.2, 4), rng.choice(topology.names))
    return trial


def submit(trial: Trial, rng: random.Random, name: str, shared: list[int], streaming: bool) -> None:
    """Submit a request. A stream is at first empty or only the end of its prompt, and grows or changes with
    each edit."""
    simulation = trial.simulation
    at = 1.1 + rng.uniform(0, 2)
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2)), seed=rng.randrange(100), temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.choice((1, 2, 5, 12, 20)), slo=rng.choice(SLOS),
    )  # fmt: skip
    tail = [rng.randrange(90) for _ in range(rng.choice((0, 3, 6)))] if streaming else []
    context = [] if streaming else shared[: rng.choice((10, 60))] + [rng.randrange(90) for _ in range(8)]
    simulation.at(
        at, Open(name, context + tail, params, open=streaming, answer_early=streaming and rng.random() < 0.3,
                 tail=len(tail))
    )  # fmt: skip
    prompt = context + tail
    edits = rng.randint(1, 6) if streaming else 0
    for version in range(1, edits + 1):
        at += rng.expovariate(5)
        retained = len(context) if rng.random() < 0.7 else rng.randint(0, len(context))
        new = shared[: rng.choice((20, 40))] if rng.random() < 0.2 else []
        context = context[:retained] + new + [rng.randrange(90) for _ in range(rng.randint(1, 30))]
        context = context[: MAX_MODEL_LEN - 30]
        before, prompt = prompt, context + tail
        kept = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), None)
        kept = min(len(before), len(prompt)) if kept is None else kept
        simulation.at(
            at, ClientEdit(name, version, kept, prompt[kept:], finish=version == edits, tail=len(tail))
        )
    if rng.random() < 0.1:
        simulation.at(at - rng.uniform(-0.3, 0.3), Close(name))
        trial.cancelled.add(name)
    for choice in range(params.n):
        trial.expected_texts[name, choice] = expected(prompt, params, choice, MAX_MODEL_LEN)


def check(trial: Trial) -> Counter[str]:
    """Run a trial to its end; return counts of its events."""
    simulation = trial.simulation
    tokens, _, withdrawn = texts(simulation.run(until=MAX_VIRTUAL_SECONDS))
    for (name, choice), text in trial.expected_texts.items():
        if name not in trial.cancelled:
            assert tokens.get((name, choice), []) == text, (name, choice)
    fleet = simulation.fleet
    assert not fleet.requests
    assert not len(fleet.transfers.reservations)
    assert not fleet.transfers.copies.open
    for state in fleet.workers.values():
        assert not any((state.prompts, state.incoming, state.decoding))
    counts: Counter[str] = Counter(
        pushes=fleet.transfers.pushes.landed,
        rerouted=fleet.dispatcher.rerouted,
        withdrawn=withdrawn,
        deaths=simulation.deaths,
    )
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
        report = worker.engine.report()
        counts["preempted"] += report.preemptions
        if report.transfer:
            counts["arriving_bytes"] += report.transfer.arriving_bytes
            counts["arriving_copies"] += report.transfer.arriving_copies
            counts["received_copies"] += report.transfer.received_copies
            counts["deferred"] += report.transfer.deferred
        if report.speculation:
            counts["accepted"] += report.speculation.accepted
    return counts


def test_prompt_streams_on_pairs_change_no_text(scale: Scale, record) -> None:
    total: Counter[str] = Counter()
    trials = scale.pick(30, 600)
    for seed in range(scale.seed, scale.seed + trials):
        total.update(check(make_trial(seed)))
    record(trials=trials, **total)
    for name in (
        "pushes",
        "arriving_bytes",
        "arriving_copies",
        "received_copies",
        "rerouted",
        "withdrawn",
        "deaths",
        "preempted",
        "accepted",
        "deferred",
    ):
        assert total[name] > 0, name
