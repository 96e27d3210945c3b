"""Latency targets in virtual time: AdaServe's workload, every policy, and engines without speculation.

Three classes of requests: 60 % strict (the profiled minimum: batch of 8, no draft tokens), 20 % at 2.4 times
that with long prompts, 20 % at 8 times; bursty arrivals. A request attains if its mean time per output token
is within its target, and its first token comes within `--ttft` times that target (0: at any time, as AdaServe
counts: then a policy that lets requests wait attains most). Goodput is the tokens a second of requests that
attain. Step costs come from a profile of this machine, or a roofline of another one; draft tokens are
accepted where those of the packaged draft were (recorded).

    python -m benchmarks.papers.slo --sweep rate --hardware here
    python -m benchmarks.papers.slo --sweep share
    python -m benchmarks.papers.slo --sweep scale
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.options import cache, parse, results_folder
from benchmarks.papers.slo_costs import PATH, Hardware, a100, h200, here
from benchmarks.recorded import RecordedDrafter, Recording, unpack
from benchmarks.report import SIMULATED, git, table, write
from streamserve.baselines.orders import ORDERS
from streamserve.baselines.routers import ByClass
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Deliver, Open
from streamserve.fleet.worker_state import unified
from streamserve.protocol.config import Order
from streamserve.protocol.messages import ModelInfo, Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec

RECORDED = Path(__file__).parents[1] / "data" / "acceptance.npz"
TRIALS_FILE = Path(__file__).parents[2] / "build" / "slo" / "trials.jsonl"
MACHINES: dict[str, Callable[[], Hardware]] = {"here": here, "a100": a100, "h200": h200}
SETTINGS = (
    "goodput", "blind", "goodput+chunked", "adaserve+chunked", "adaserve-as-published+chunked",
    "equal-greedy+chunked", "global-greedy+chunked", "specinfer-tree+chunked", "adaserve-as-published",
    "equal-greedy", "off", "chunked", "prefill-first", "fcfs", "stta", "separate",
)  # fmt: skip
"""A setting is POLICY+ORDER, a policy of speculation in the order that uses targets, or an order alone.
`blind` is goodput without the targets. An order alone is continuous batching without speculation; `separate`
is `chunked` with a machine for each class, so the requests are multiplied by the number of machines."""
TIMES_MINIMUM = (1.0, 2.4, 8.0)
SHARES = (0.6, 0.2, 0.2)
PIPELINES = len(TIMES_MINIMUM)
"""Number of machines of the setting `separate`."""
OUTPUT = (32, 96)
FIRST = 10.0
"""The target for the first token as a multiple of the target for further tokens. MLPerf's inference rules
have 2 s and 200 ms for Llama 2 70B as a server, and 450 and 40 ms for its interactive scenario."""
BURSTINESS = 2.0
"""Coefficient of variation of the times between arrivals."""
SWEEPS: dict[str, tuple[float, ...]] = {
    "rate": (0.6, 1.0, 2.0, 3.0, 4.0, 6.0), "loose": (1.0, 3.0), "share": (0.2, 0.4, 0.6, 0.8, 1.0),
    "scale": (1.0, 0.8, 0.6),
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """The load of a simulation. `rate` is the share of the requests a second that plain decoding in batches
    of 8 could serve; `strict` is the share of strict requests, and `scale` their target as a multiple of the
    minimum. With `loose`, no target binds. The target of first tokens is `ttft` times the target of further
    tokens; with 0 there is none."""

    rate: float = 0.8
    strict: float = 0.6
    scale: float = 1.0
    requests: int = 40
    loose: bool = False
    ttft: float = FIRST


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload."""

    at: float
    kind: int
    prompt: int
    output: int
    text: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request: its class, whether it met both targets, whether it met the target for further
    tokens, its tokens, seconds to the first token and between further tokens, and when it ended."""

    kind: int
    met: bool
    met_tpot: bool
    tokens: int
    ttft: float
    tpot: float
    end: float


def minimum(hardware: Hardware) -> float:
    """Return the profiled minimum of the time per output token: batch 8, 32 tokens in, 128 out, no draft
    tokens."""
    return float(np.mean([hardware.step(8, 8 * (32 + done)) for done in range(128)]))


def workload(hardware: Hardware, load: Load, seed: int) -> list[WorkloadRequest]:
    """Return requests of all classes in order of arrival."""
    rng = random.Random(seed)
    served = 8 / minimum(hardware) / (sum(OUTPUT) / 2)
    shape = 1 / BURSTINESS**2
    shares = (load.strict, (1 - load.strict) / 2, (1 - load.strict) / 2)
    measured, now = [], 0.0
    for _ in range(load.requests):
        now += rng.gammavariate(shape, 1 / (shape * load.rate * served))
        kind = rng.choices(range(3), shares)[0]
        prompt = rng.randint(96, 192) if kind == 1 else rng.randint(16, 48)
        measured.append(WorkloadRequest(now, kind, prompt, rng.randint(*OUTPUT), rng.randrange(1 << 16)))
    return measured


def model() -> ModelInfo:
    """Return the simulated engine's model info."""
    return ModelInfo(
        architecture="simulated", parameters=0, vocab_size=4096, max_model_len=1024, eos_token_ids=(),
        weight_bytes=0, dtype="none", row_invariant=True, fingerprint="simulated",
    )  # fmt: skip


def parse_setting(setting: str) -> tuple[str, Order]:
    """Return the speculation policy and the order of a setting, `POLICY` or `POLICY+ORDER`, or of an order
    alone."""
    if setting in ORDERS:
        return "off", cast(Order, setting)
    policy, _, order = setting.partition("+")
    policy = {"blind": "goodput", "separate": "off"}.get(policy, policy)
    return policy, cast(Order, order or ("chunked" if setting == "separate" else "slo"))


def engine_config(hardware: Hardware, setting: str, blocks: int = 4096) -> EngineConfig:
    """Return the configuration of an engine with a setting's order."""
    return EngineConfig(
        num_blocks=blocks, max_model_len=1024, max_num_seqs=256, max_num_batched_tokens=512,
        max_chunk=max(16, 2 * hardware.budget), enable_prefix_caching=False, order=parse_setting(setting)[1],
    )  # fmt: skip


def fleet(setting: str, targets: Sequence[float]) -> FleetConfig:
    """Return the configuration of one machine, or one for each class of targets."""
    if setting != "separate":
        return FleetConfig()
    ends = sorted({goal * 1.001 for goal in targets[:-1]})
    return FleetConfig(unified(PIPELINES), ByClass(tuple(ends)))


def goals(hardware: Hardware, load: Load) -> list[float]:
    """Return the targets for the time per output token, by class, in seconds."""
    shortest = minimum(hardware)
    if load.loose:
        return [1e3 * shortest] * len(TIMES_MINIMUM)
    return [shortest * times * (load.scale if kind == 0 else 1.0) for kind, times in enumerate(TIMES_MINIMUM)]


def sampling(setting: str, load: Load, one: WorkloadRequest, goal: float) -> SamplingParams:
    """Return a request's parameters; its seed selects the recorded text."""
    first = load.ttft * goal
    slo = Slo(tpot_ms=1e3 * goal, ttft_ms=1e3 * first if first else None)
    slo = Slo() if setting == "blind" else slo
    return SamplingParams(temperature=0.0, seed=one.text, max_tokens=one.output, slo=slo)


def outcome(one: WorkloadRequest, times: Sequence[float], load: Load, goal: float) -> Outcome:
    """Return the outcome of a request whose tokens arrived at these times."""
    ttft, tpot = times[0] - one.at, (times[-1] - times[0]) / max(len(times) - 1, 1)
    met_tpot = tpot <= goal * (1 + 1e-9)
    met = met_tpot and (not load.ttft or ttft <= load.ttft * goal)
    return Outcome(one.kind, met, met_tpot, len(times), ttft, tpot, times[-1])


def simulate(
    hardware: Hardware, recording: Recording, setting: str, load: Load,
    trace_requests: Sequence[WorkloadRequest], targets: Sequence[float],
) -> tuple[list[Outcome], float]:  # fmt: skip
    """Return the outcome of each request with these targets by class, and the share of the steps' time spent
    drafting."""
    policy, _ = parse_setting(setting)
    simulation = Simulation(
        fleet(setting, targets),
        WorkerSpec(
            engine_config(hardware, setting),
            model(),
            hardware.step,
            start_seconds=0.0,
            policy=policy,
            drafter=None
            if policy == "off"
            else lambda executor: RecordedDrafter(recording, executor, hardware.draft),
        ),
    )
    for number, one in enumerate(trace_requests):
        prompt = [(number * 131 + position * 7) % 4096 for position in range(one.prompt)]
        params = sampling(setting, load, one, targets[one.kind])
        simulation.at(one.at, Open(str(number), prompt, params))
    times: dict[str, list[float]] = defaultdict(list)
    for received in simulation.run():
        assert isinstance(received.message, Deliver), received.message
        for event in received.message.events:
            if isinstance(event, Token):
                times[event.request].append(received.time)
    measured = [outcome(one, times[str(i)], load, targets[one.kind]) for i, one in enumerate(trace_requests)]
    reports = [worker.engine.report().step_parts for worker in simulation.workers.values()]
    drafting = sum(report.draft for report in reports if report)
    return measured, drafting / (drafting + sum(report.target for report in reports if report))


def figures(every: Sequence[Outcome], since: float) -> dict[str, float]:
    """Return attainment, goodput and throughput in tokens a second, mean seconds to the first token, and mean
    seconds per further token."""
    span = max(one.end for one in every) - since
    return {
        "attainment": float(np.mean([one.met for one in every])),
        "strict": float(np.mean([one.met for one in every if one.kind == 0] or [1.0])),
        "paced": float(np.mean([one.met_tpot for one in every])),
        "goodput": sum(one.tokens for one in every if one.met) / span,
        "throughput": sum(one.tokens for one in every) / span,
        "ttft": float(np.mean([one.ttft for one in every])),
        "tpot": float(np.mean([one.tpot for one in every])),
    }


def recorded() -> Recording:
    """Return the recording of the packaged draft."""
    with np.load(RECORDED, allow_pickle=False) as arrays:
        return unpack({name: arrays[name] for name in arrays.files})


def trial(machine: str, setting: str, load: Load, seed: int) -> dict[str, float]:
    """Return the results of one seed."""
    hardware, recording = MACHINES[machine](), recorded()
    # The requests are multiplied by the number of machines.
    machines = PIPELINES if setting == "separate" else 1
    load = replace(load, rate=machines * load.rate, requests=machines * load.requests)
    trace_requests = workload(hardware, load, seed)
    every, drafting = simulate(hardware, recording, setting, load, trace_requests, goals(hardware, load))
    measured = figures(every, trace_requests[0].at)
    for name in ("goodput", "throughput"):
        measured[name] /= machines
    return measured | {"drafting": drafting}


SHOWN = (("attainment", "{:.0%}"), ("strict", "{:.0%}"), ("paced", "{:.0%}"), ("goodput", "{:.1f}"),
         ("throughput", "{:.1f}"), ("ttft", "{:.2f}"),
         ("drafting", "{:.0%}"))  # fmt: skip


def interval(values: Sequence[float], rng: np.random.Generator) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the mean."""
    drawn = rng.choice(np.array(values), (1000, len(values))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record for each point of the sweep and setting: means over the seeds with their intervals.
    Trials are cached by their settings, code and step costs, so a sweep can be resumed."""
    base = Load(rate=args.rate, requests=args.requests, ttft=args.ttft)
    points = args.points or SWEEPS[args.sweep]
    loads = {
        "rate": [replace(base, rate=point) for point in points],
        "share": [replace(base, strict=point) for point in points],
        "scale": [replace(base, strict=1.0, scale=point) for point in points],
        "loose": [replace(base, rate=point, loose=True) for point in points],
    }[args.sweep]
    jobs = [(s, n, seed) for seed in range(args.seeds) for n in range(len(loads)) for s in args.settings]
    code = git("rev-parse", "HEAD:src")[:12] + git("hash-object", str(PATH))[:12]
    names = {job: f"{code} {args.hardware} {job[0]} {loads[job[1]]} {job[2]}" for job in jobs}
    path = cache(TRIALS_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = {name: figures for line in lines for name, figures in json.loads(line).items()}
    started = time.monotonic()
    with path.open("a") as trials_file:
        for job in jobs:
            if names[job] not in outcomes and time.monotonic() - started < args.seconds:
                outcomes[names[job]] = trial(args.hardware, job[0], loads[job[1]], job[2])
                print(json.dumps({names[job]: outcomes[names[job]]}), file=trials_file, flush=True)
    rng, records = np.random.default_rng(0), []
    for number, point in enumerate(points):
        for setting in args.settings:
            keys = [names[setting, number, seed] for seed in range(args.seeds)]
            trials = [outcomes[key] for key in keys if key in outcomes]
            if not trials:
                continue
            record: dict[str, Any] = {args.sweep: point, "setting": setting, "seeds": len(trials)}
            for name in trials[0]:
                values = [one[name] for one in trials]
                record[name] = float(np.mean(values))
                record[f"{name}_interval"] = interval(values, rng)
            records.append(record)
    return records


def show(args: argparse.Namespace, records: list[dict[str, Any]], hardware: Hardware) -> None:
    """Print attainment and goodput, one line for each setting."""
    points = list(dict.fromkeys(record[args.sweep] for record in records))
    for name, form in SHOWN:
        rows = []
        for setting in args.settings:
            cells = [r for r in records if r["setting"] == setting]
            rows.append(
                [setting]
                + [
                    f"{form.format(r[name])} ({', '.join(form.format(v) for v in r[name + '_interval'])})"
                    for r in cells
                ]
            )
        title = f"{name} by {args.sweep}; B = {hardware.budget}; {hardware.note}; up to {args.seeds} seeds"
        table(title, ["policy", *(f"{point:g}" for point in points)], rows)


def plot(args: argparse.Namespace, records: list[dict[str, Any]], hardware: Hardware, name: str) -> None:
    """Plot attainment and goodput against the swept setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4))
    for panel, what in zip(panels, ("attainment", "goodput"), strict=True):
        for setting in dict.fromkeys(r["setting"] for r in records):
            own = [r for r in records if r["setting"] == setting]
            at = [r[args.sweep] for r in own]
            panel.plot(at, [r[what] for r in own], marker="o", label=setting,
                       linewidth=3 if setting == "goodput" else 1)  # fmt: skip
            low, high = zip(*(r[f"{what}_interval"] for r in own), strict=True)
            panel.fill_between(at, low, high, alpha=0.12)
        panel.set(xlabel=args.sweep, ylabel=what)
    panels[0].legend(fontsize=7)
    figure.suptitle(f"virtual time; B = {hardware.budget}; {hardware.note}", fontsize=9)
    figure.tight_layout()
    figure.savefig(results_folder() / f"{name}.png", dpi=110)


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", choices=list(SWEEPS), default="rate")
    parser.add_argument("--hardware", choices=list(MACHINES), default="here")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--points", nargs="+", type=float, help="points of the sweep")
    parser.add_argument("--rate", type=float, default=0.8, help="rate while another value is swept")
    parser.add_argument("--requests", type=int, default=40, help="requests in each seed")
    parser.add_argument(
        "--ttft", type=float, default=FIRST, help="TTFT target as a multiple of the TPOT target"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no trial after this time")
    parser.add_argument("--suffix", default="", help="suffix of the result files' names")
    args = parse(parser, points=[0.6], requests=2, seeds=1)
    hardware = MACHINES[args.hardware]()
    records = measure(args)
    show(args, records, hardware)
    name = f"slo_{args.sweep}_{args.hardware}{args.suffix}"
    write(name, {**vars(args), "B": hardware.budget, "costs": hardware.note,
                 "minimum_tpot_ms": 1e3 * minimum(hardware)}, records, SIMULATED)  # fmt: skip
    plot(args, records, hardware, name)


if __name__ == "__main__":
    main()
