"""StreamServe's tables 3 to 8 and figures 3 and 4 in virtual time: the live Fleet and Engines on the costs of
one machine, with recorded drafts of four families of tasks.

A device is a machine that was measured, or a roofline of four A100 (`--machine`). On four of them:
`streamserve` is two stream pairs with FlowGuard, `data parallel` four independent workers in round-robin
order, `tensor parallel` one worker whose steps take a quarter of the time, without any cost of communication
between devices, which favours it. All use SpecuStream unless stated otherwise. Eighty requests a run, at a
constant concurrency; prompts have the lengths of the paper's kinds of tasks, after one of four instructions
of a family, which share their prefix.

Throughput has two definitions: the paper's, the mean over requests of (prompt + generated) / latency; and the
usual one, output tokens a second in total. The interaction of disaggregation and speculation is
speculation's speed-up of pairs divided by its speed-up of unified workers, by the second definition.

    python -m benchmarks.papers.streamserve --machine a100 --seeds 3
"""

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.options import parse, pick, results_folder
from benchmarks.papers.slo_costs import Hardware, a100, here
from benchmarks.recorded import RecordedDrafter, Recording, unpack
from benchmarks.report import SIMULATED, table, write
from streamserve.baselines.routers import parse_router
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Command, Deliver, Open
from streamserve.fleet.worker_state import Topology, pairs, unified
from streamserve.protocol.messages import ModelInfo, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.transport import LAYERS
from streamserve.simulate.worker import WorkerSpec

MACHINES: dict[str, Callable[[], Hardware]] = {"a100": a100, "here": here}
RECORDED = Path(__file__).parents[1] / "data" / "acceptance.npz"
REQUESTS = 80
PROMPTS = {
    "instructions": (30, 120),
    "arithmetic": (60, 200),
    "functions": (100, 300),
    "articles": (500, 1200),
}
"""Shortest and longest prompt of each family, in tokens: ALPACA, GSM8K, HUMANEVAL, SUM."""
OUTPUTS = (48, 160)
WIRE_SECONDS = {"a100": 16 * 328e3 / 25e9, "here": 16 * 49152 / 8e9}
"""Seconds to send a block: at 25 GB/s, a network of 200 Gbit/s, and at the measured rate of shared memory."""
INSTRUCTIONS, INSTRUCTION_TOKENS = 4, 64
"""Number of instructions of each family, and tokens of an instruction."""
ENGINE = EngineConfig(
    num_blocks=3000, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, max_chunk=256
)
MODEL = ModelInfo(
    architecture="simulated", parameters=0, vocab_size=1000, max_model_len=4096, eos_token_ids=(),
    weight_bytes=0, dtype="none", row_invariant=True, fingerprint="simulated",
)  # fmt: skip


@dataclass(frozen=True)
class System:
    """A serving system. `share` is the time of its step as a fraction of one device's step."""

    topology: Topology = field(default_factory=lambda: pairs(2))
    router: str = "flowguard"
    policy: str = "specustream"
    share: float = 1.0
    engine: EngineConfig = ENGINE
    layers: int = LAYERS


WHOLE = msgspec.structs.replace(ENGINE, max_chunk=2048, max_num_batched_tokens=2048)
SYSTEMS = {
    "streamserve": System(),
    "data parallel": System(unified(4), "round-robin"),
    "tensor parallel": System(unified(1), share=0.25),
}
ABLATIONS = {
    "full": System(),
    "FlowGuard as published": System(router="flowguard-as-published"),
    "round-robin": System(router="round-robin"),
    "no speculation": System(policy="off"),
    "monolithic": System(unified(4)),
    "all KV at the end": System(engine=WHOLE, layers=1),
    "no FlowGuard (random)": System(router="random"),
    "SpecuStream as published": System(policy="specustream-as-published"),
    "fixed speculation (5)": System(policy="fixed:5"),
    "goodput": System(policy="goodput"),
    "monolithic, no speculation": System(unified(4), policy="off"),
}


class Closed(Simulation):
    """A closed loop: a request starts when an earlier one ends."""

    waiting: list[Open] = []  # noqa: RUF012

    def _do(self, commands: list[Command]) -> None:
        super()._do(commands)
        for command in commands:
            if isinstance(command, Deliver) and command.last and self.waiting:
                self.at(self.clock.now, self.waiting.pop())


def recording() -> Recording:
    """Return the recorded drafts."""
    with np.load(RECORDED) as arrays:
        return unpack({name: arrays[name] for name in arrays.files})


def requests(family: str, recorded: Recording, seed: int) -> list[Open]:
    """Return requests whose prompts have the lengths of a family, and whose seeds select texts of that
    family."""
    rng = random.Random(f"{family}/{seed}")
    texts = [number for number, name in enumerate(recorded.families) if name == family]
    made = []
    instructions = [[rng.randrange(1000) for _ in range(INSTRUCTION_TOKENS)] for _ in range(INSTRUCTIONS)]
    for number in range(pick(REQUESTS, 2)):
        task = [rng.randrange(1000) for _ in range(rng.randint(*PROMPTS[family]))]
        prompt = rng.choice(instructions) + task
        params = SamplingParams(temperature=0, seed=rng.choice(texts), max_tokens=rng.randint(*OUTPUTS))
        made.append(Open(f"r{number}", prompt, params))
    return made


def simulate(name: str, system: System, family: str, at_once: int, seed: int) -> dict[str, float]:
    """Return the results of one run."""
    machine, recorded = MACHINES[name](), recording()
    fleet = FleetConfig(topology=system.topology, router=parse_router(system.router))
    simulation = Closed(
        fleet,
        WorkerSpec(
            system.engine,
            MODEL,
            lambda tokens, kv: system.share * machine.step(tokens, kv),
            wire_seconds=WIRE_SECONDS[name],
            layers=system.layers,
            policy=system.policy,
            drafter=None
            if system.policy == "off"
            else lambda executor: RecordedDrafter(
                recorded, executor, lambda tokens: system.share * machine.draft(tokens)
            ),
        ),
    )
    trace_requests = requests(family, recorded, seed)
    simulation.waiting = trace_requests[at_once:][::-1]
    for one in trace_requests[:at_once]:
        simulation.at(1.5, one)
    opened = {one.request: one for one in trace_requests}
    times: dict[str, list[float]] = {}
    for received in simulation.run():
        assert isinstance(received.message, Deliver)
        tokens = sum(isinstance(event, Token) for event in received.message.events)
        times.setdefault(received.message.request, []).extend([received.time] * tokens)
    return figures(opened, times, {e.request: e.time for e in simulation.fleet.placement.recent})


def figures(
    opened: dict[str, Open], times: dict[str, list[float]], began: dict[str, float]
) -> dict[str, float]:
    """Return the results of requests that began at `began` and whose tokens arrived at `times`."""
    latency = {name: seen[-1] - began[name] for name, seen in times.items()}
    tpot = [(seen[-1] - seen[0]) / max(len(seen) - 1, 1) for seen in times.values()]
    span = max(seen[-1] for seen in times.values()) - min(began.values())
    both = [(len(opened[name].prompt) + len(seen)) / latency[name] for name, seen in times.items()]
    shown = {f"p{p}": float(np.percentile(list(latency.values()), p)) for p in (50, 90, 95, 99)}
    return {
        "latency": float(np.mean(list(latency.values()))),
        **shown,
        "tpot": float(np.mean(tpot)),
        "ttft": float(np.mean([seen[0] - began[name] for name, seen in times.items()])),
        "throughput_printed": float(np.mean(both)),
        "tokens_per_second": sum(map(len, times.values())) / span,
    }


def median(
    pool: ProcessPoolExecutor | None, machine: str, seeds: int, system: System, family: str, at_once: int
) -> dict[str, float]:
    """Return medians over seeds. The seeds run in this process if no pool is given."""
    apply = pool.map if pool else map
    measured = list(apply(partial(simulate, machine, system, family, at_once), range(seeds)))
    return {key: float(np.median([one[key] for one in measured])) for key in measured[0]}


def interaction(ablated: dict[str, dict[str, float]]) -> float:
    """Return speculation's speed-up of pairs divided by its speed-up of unified workers, in output tokens a
    second."""
    speed = {name: one["tokens_per_second"] for name, one in ablated.items()}
    of_pairs = speed["full"] / speed["no speculation"]
    return of_pairs / (speed["monolithic"] / speed["monolithic, no speculation"])


def show(title: str, measured: dict[str, dict[str, float]]) -> None:
    """Print one table."""
    columns = ["", "latency, s", "p50", "p95", "p99", "TTFT, s", "TPOT, ms", "tokens/s", "as published"]
    rows = [
        [name, *(f"{f[key]:.2f}" for key in ("latency", "p50", "p95", "p99", "ttft")),
         f"{1e3 * f['tpot']:.1f}", f"{f['tokens_per_second']:.0f}", f"{f['throughput_printed']:.0f}"]
        for name, f in measured.items()
    ]  # fmt: skip
    table(f"{title} (virtual time)", columns, rows)


def plot(sweep: Sequence[dict[str, Any]], machine: str) -> None:
    """Plot figures 3 and 4: latency percentiles and throughput by concurrent requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, panels = plt.subplots(1, 3, figsize=(14, 4))
    shown = (
        ("p50", "median latency, s"),
        ("p99", "p99 latency, s"),
        ("tokens_per_second", "output tokens/s"),
    )
    for panel, (key, label) in zip(panels, shown, strict=True):
        for name in SYSTEMS:
            panel.plot([one["at_once"] for one in sweep], [one[name][key] for one in sweep], "o-", label=name)
        panel.set(xlabel="requests at once", ylabel=label, xscale="log")
    panels[0].legend(fontsize=8)
    canvas.tight_layout()
    canvas.savefig(results_folder() / f"streamserve_{machine}.png", dpi=110)


def main() -> None:
    """Simulate, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=tuple(MACHINES), default="a100")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=16, help="concurrent requests in the tables")
    parser.add_argument("--sweep", type=int, nargs="*", default=[1, 4, 16, 40])
    parser.add_argument("--processes", type=int, default=1)
    args = parse(parser, seeds=1, at_once=2, sweep=[1])
    result: dict[str, Any] = {"families": {}, "ablation": {}, "interaction": {}, "sweep": []}
    settings = {**vars(args), "costs": MACHINES[args.machine]().note, "requests": REQUESTS, "time": "virtual"}
    with ProcessPoolExecutor(args.processes) if args.processes > 1 else nullcontext() as pool:
        run = partial(median, pool, args.machine, args.seeds)
        for family in pick(list(PROMPTS), list(PROMPTS)[:1]):
            measured = {name: run(system, family, args.at_once) for name, system in SYSTEMS.items()}
            ablated = {
                name: measured["streamserve"] if name == "full" else run(system, family, args.at_once)
                for name, system in ABLATIONS.items()
            }
            show(f"{family}: tables 3 to 7", measured)
            show(f"{family}: table 8", ablated)
            result["families"][family], result["ablation"][family] = measured, ablated
            result["interaction"][family] = interaction(ablated)
            write(f"streamserve_{args.machine}", settings, result, SIMULATED)
        print("interaction", result["interaction"])
        for at_once, family in itertools.product(args.sweep, ["functions"]):
            swept = {name: run(system, family, at_once) for name, system in SYSTEMS.items()}
            show(f"{family}, {at_once} at once: figures 3 and 4", swept)
            result["sweep"].append({"at_once": at_once, "family": family, **swept})
    print(write(f"streamserve_{args.machine}", settings, result, SIMULATED))
    plot(result["sweep"], args.machine)


if __name__ == "__main__":
    main()
