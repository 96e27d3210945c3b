"""Routers over stream pairs, in virtual time: the same Fleet and Engines as live, on an A100-like cost curve.

Four traces: requests of a few groups that share a long prefix (`shared`), prompts of very different lengths
(`skewed`), arrivals in bursts (`bursty`), and prompts of evenly distributed lengths (`uniform`). Every router
serves the same requests. The default router is compared with each other router by goodput (requests a second
that meet both targets; paired differences over the seeds) and by p95 TTFT (ratios). The time of a routing
decision is measured in real time, with and without the fleet's bookkeeping.

    python -m benchmarks.papers.pairs --pairs 2 4 16 --seeds 0 20

Results are kept by seed and cell: a run adds those that the result file lacks, unless the settings differ.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.options import parse, pick, results_folder
from benchmarks.papers.slo_costs import a100
from benchmarks.report import SIMULATED, table, write
from streamserve.baselines.routers import ROUTERS
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Close, Deliver, Open, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.messages import PROTOCOL_VERSION, ModelInfo, Ready, Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.scheduling.predictive import Predictive
from streamserve.scheduling.routing import (
    Arrival,
    Decision,
    RouteCandidate,
    Router,
)
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec

DEFAULT = "flowguard"
"""The default router."""
TRACES = ("shared", "skewed", "bursty", "uniform")
RATES = {"shared": 14.0, "skewed": 18.0, "bursty": 9.0, "uniform": 11.0}
"""Requests a second for each pair. They load the prefill workers to 0.6 to 0.8. With shared prefixes the load
depends on the router: it would be 1.8 without cached prefixes."""
OUTPUT = (16, 64)
ENGINE = EngineConfig(
    num_blocks=1500, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=512, max_chunk=512
)
MODEL = ModelInfo(
    architecture="simulated", parameters=0, vocab_size=1000, max_model_len=4096, eos_token_ids=(),
    weight_bytes=0, dtype="none", row_invariant=True, fingerprint="simulated",
)  # fmt: skip
TARGETS = {
    "shared": (0.25, 0.025), "skewed": (0.25, 0.025), "bursty": (0.75, 0.025), "uniform": (0.25, 0.025)
}  # fmt: skip
"""The targets of each trace, in seconds, for goodput: time to the first token, time per further token.
They are set so that some routers miss them occasionally."""
KV_TOKEN_BYTES = 327_680
KV_TOKEN = (a100().step(1, 1 << 20) - a100().step(1, 0)) / (1 << 20)
"""Seconds by which each KV token lengthens a simulated step."""
OPEN = 4
"""Open requests on each pair while decisions are timed."""
REQUESTS = {2: 60, 4: 60, 16: 96}
"""Number of requests in a trace by number of pairs."""


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a trace."""

    at: float
    prompt: list[int]
    output: int


def trace(kind: str, count: int, rate: float, seed: int) -> list[WorkloadRequest]:
    """Return `count` requests at `rate` a second."""
    rng = random.Random(f"{kind}/{seed}")
    heads = [[rng.randrange(1000) for _ in range(1024)] for _ in range(8)]
    trace_requests, at = [], 1.5
    for number in range(count):
        burst = kind == "bursty" and number % 16
        at += 0.0 if burst else rng.expovariate(rate / (16 if kind == "bursty" else 1))
        if kind == "shared":
            head = heads[min(int(rng.paretovariate(1.1)) - 1, len(heads) - 1)]
            prompt = head + [rng.randrange(1000) for _ in range(rng.randint(16, 256))]
        elif kind == "skewed":
            prompt = [rng.randrange(1000) for _ in range(min(int(64 * rng.paretovariate(0.9)), 3500))]
        else:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(128, 1024))]
        trace_requests.append(WorkloadRequest(at, prompt, rng.randint(*OUTPUT)))
    return trace_requests


def routers() -> dict[str, Router]:
    """Return all routers. The `predictive` router is given the mean output length of the traces."""
    return {**ROUTERS, "predictive": Predictive(output=sum(OUTPUT) // 2)}


def simulate(
    router: Router, count: int, trace_requests: Sequence[WorkloadRequest], targets: tuple[float, float]
) -> dict[str, float]:
    """Simulate a trace with a router; return p95 time to first token, output tokens a second, attainment,
    goodput in requests a second, and the number of requests handed over."""
    fleet = FleetConfig(topology=pairs(count), router=router)
    simulation = Simulation(
        fleet,
        WorkerSpec(
            ENGINE,
            MODEL,
            a100().step,
            wire_seconds=1e-4,
            curve=_curve(1.0),
            kv_token_bytes=KV_TOKEN_BYTES,
        ),
    )
    for number, one in enumerate(trace_requests):
        slo = Slo(ttft_ms=1e3 * targets[0], tpot_ms=1e3 * targets[1])
        params = SamplingParams(temperature=0, max_tokens=one.output, seed=0, slo=slo)
        simulation.at(one.at, Open(f"r{number}", one.prompt, params))
    times: dict[str, list[float]] = {}
    for received in simulation.run():
        assert isinstance(received.message, Deliver)
        times.setdefault(received.message.request, []).extend(
            received.time for event in received.message.events if isinstance(event, Token)
        )
    first = [times[f"r{number}"][0] - one.at for number, one in enumerate(trace_requests)]
    each = [(t[-1] - t[0]) / max(len(t) - 1, 1) for t in (times[f"r{n}"] for n in range(len(trace_requests)))]
    met = [ttft <= targets[0] and tpot <= targets[1] for ttft, tpot in zip(first, each, strict=True)]
    span = max(t[-1] for t in times.values()) - trace_requests[0].at
    reports = [worker.engine.report().transfer for worker in simulation.workers.values()]
    return {
        "ttft_p95": float(np.percentile(first, 95)),
        "tokens_per_second": sum(one.output for one in trace_requests) / span,
        "attainment": float(np.mean(met)),
        "goodput": sum(met) / span,
        "handed_over": float(sum(report.handed_over for report in reports if report)),
    }


def seed_figures(count: int, kind: str, seed: int) -> dict[str, dict[str, float]]:
    """Return the results of every router on one trace."""
    trace_requests = trace(kind, pick(REQUESTS[count], 4), RATES[kind] * count, seed)
    return {
        name: simulate(router, count, trace_requests, TARGETS[kind]) for name, router in routers().items()
    }


ResultsBySeed = Sequence[dict[str, dict[str, float]]]
"""For each seed, the results of every router."""


def summary(measured: ResultsBySeed) -> dict[str, dict[str, Any]]:
    """Return for each router the means over seeds; and compared with the default router, the difference in
    goodput as a share of this router's goodput, and the ratio of p95 TTFT."""
    return {
        name: {
            **{key: float(np.mean([one[name][key] for one in measured])) for key in measured[0][name]},
            "difference": difference(measured, name),
            "ratio": ratio(measured, DEFAULT, name, "ttft_p95"),
        }
        for name in measured[0]
    }


def difference(measured: ResultsBySeed, other: str) -> dict[str, float]:
    """Return the mean paired difference between the default router's goodput and another's, relative to the
    other's."""
    goodput = np.array([(one[DEFAULT]["goodput"], one[other]["goodput"]) for one in measured])
    return interval(list((goodput[:, 0] - goodput[:, 1]) / goodput[:, 1].mean()), np.mean)


def ratio(measured: ResultsBySeed, one: str, other: str, key: str) -> dict[str, float]:
    """Return the median over seeds of the ratio between two routers' values."""
    return interval([seed[one][key] / seed[other][key] for seed in measured], np.median)


def interval(values: Sequence[float], of: Callable[..., Any]) -> dict[str, float]:
    """Return the median or mean `of` the values with its 95 % bootstrap interval."""
    drawn = of(np.random.default_rng(0).choice(np.array(values), (2000, len(values))), axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"value": float(of(values)), "low": float(low), "high": float(high)}


def decision_seconds(name: str, count: int, times: int = 2000) -> dict[str, dict[str, float]]:
    """Return the median and 99th percentile of the real seconds that the router of this `name` takes for a
    `decision` over `count` pairs, each worker with a different curve, while requests arrive and finish; and
    of `placing` a request in total, with the fleet's bookkeeping and block hashes."""
    decided, placed = [], []

    def timed(arrival: Arrival, places: Sequence[RouteCandidate], turn: int) -> Decision:
        started = time.perf_counter()
        decision = router(arrival, places, turn)
        decided.append(time.perf_counter() - started)
        return decision

    router = ROUTERS[name]
    fleet = Fleet(FleetConfig(topology=pairs(count), router=timed, max_requests=times))
    fleet.start(0.0)
    for number, worker in enumerate(fleet.workers):
        ready = Ready(
            version=PROTOCOL_VERSION, model=MODEL, num_blocks=ENGINE.num_blocks, block_size=ENGINE.block_size,
            max_num_seqs=ENGINE.max_num_seqs, kv_cache_bytes=0, load_seconds=0.0,
            cost=_curve(1 + number / 1000),
            kv_token_bytes=KV_TOKEN_BYTES,
        )  # fmt: skip
        fleet.handle(WorkerMessage(worker, 1, ready), 0.0)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=9, seed=0, slo=Slo(ttft_ms=250, tpot_ms=25))
    for number in range(times):
        now = number / (OPEN * count)
        prompt = [rng.randrange(1000) for _ in range(rng.randint(64, 1024))]
        started = time.perf_counter()
        fleet.handle(Open(f"r{number}", prompt, params), now)
        placed.append(time.perf_counter() - started)
        if number >= OPEN * count:
            fleet.handle(Close(f"r{number - OPEN * count}"), now)
    return {"decision": _spread(decided), "placing": _spread(placed)}


def _curve(scale: float) -> CostCurve:
    """Return the step costs of a worker that is `scale` times as slow as the simulated machine."""
    step, rows, tokens, kv = a100().step, (1, 128, 256, 512), (0, 16_384, 65_536), KV_TOKEN_BYTES
    return CostCurve(
        tokens=rows, kv_bytes=tuple(kv * held for held in tokens),
        seconds=tuple(tuple(scale * step(count, held) for held in tokens) for count in rows),
        pair_seconds=0.0, token_seconds=0.0, byte_seconds=scale * KV_TOKEN / kv,
    )  # fmt: skip


def _spread(taken: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(taken)), "p99": float(np.percentile(taken, 99))}


def settings() -> dict[str, Any]:
    """Return the settings that results depend on."""
    return {
        "requests": {str(count): requests for count, requests in REQUESTS.items()}, "rates": RATES,
        "targets": {kind: list(targets) for kind, targets in TARGETS.items()},
        "curve": a100().note, "time": "virtual, but for decisions",
    }  # fmt: skip


def recorded() -> dict[str, Any]:
    """Return the results by seed of each cell in the result file that were computed with these settings, and
    the times of decisions."""
    path = results_folder() / "pairs.json"
    read = json.loads(path.read_text()) if path.exists() else {"settings": None}
    return read["figures"] if read["settings"] == settings() else {"seeds": {}, "decision_seconds": {}}


def record(figures: dict[str, Any]) -> None:
    """Write results by seed, and the values computed from them."""
    played = [
        {"trace": kind, "pairs": count, "seeds": len(seeds), "routers": summary(list(seeds.values()))}
        for kind in TRACES
        for count in REQUESTS
        if (seeds := figures["seeds"].get(f"{kind}, {count}"))
    ]
    write("pairs", settings(), figures | {"played": played}, SIMULATED)


def show(one: dict[str, Any]) -> None:
    """Print the results of a cell."""
    rows = [
        [name, f"{f['goodput']:.2f}", _text(f["difference"], 100), f"{f['ttft_p95'] * 1e3:.0f}",
         _text(f["ratio"]), f"{f['attainment']:.1%}"]
        for name, f in one["routers"].items()
    ]  # fmt: skip
    columns = [
        "router", "goodput", f"{DEFAULT}'s difference, %", "p95 TTFT, ms", f"{DEFAULT}'s ratio", "attainment"
    ]  # fmt: skip
    title = f"{one['trace']}, {one['pairs']} pairs, {one['seeds']} seeds (simulated, A100-like)"
    table(title, columns, rows)


def _text(measured: dict[str, float], factor: float = 1.0) -> str:
    value, low, high = (measured[key] * factor for key in ("value", "low", "high"))
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _micros(taken: dict[str, float]) -> str:
    return f"{taken['median'] * 1e6:.0f} ({taken['p99'] * 1e6:.0f})"


def main() -> None:
    """Simulate the cells that are not recorded yet, and write and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="*", choices=[*REQUESTS], default=[*REQUESTS])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument(
        "--seeds", type=int, nargs=2, default=[0, 20], help="first seed, and the end of the range"
    )
    parser.add_argument("--decisions", action="store_true", help="also measure the time of decisions")
    args = parse(parser, pairs=[2], traces=["shared"], seeds=[0, 1], decisions=True)
    for seed in range(*args.seeds):
        for kind in args.traces:
            for count in args.pairs:
                if str(seed) in recorded()["seeds"].get(f"{kind}, {count}", {}):
                    continue
                results = seed_figures(count, kind, seed)
                figures = recorded()  # another process may have written meanwhile
                figures["seeds"].setdefault(f"{kind}, {count}", {})[str(seed)] = results
                record(figures)
    figures = recorded()
    if args.decisions:
        figures["decision_seconds"] = {
            str(count): {name: decision_seconds(name, count, pick(2000, 20)) for name in ROUTERS}
            for count in pick((2, 16, 64), (2,))
        }
        record(figures)
    for one in figures.get("played", []):
        show(one)
    for what in ("decision", "placing"):
        decisions = figures["decision_seconds"]
        rows = [[name, *(_micros(of[name][what]) for of in decisions.values())] for name in ROUTERS]
        table(f"{what} in µs, median (p99)", ["", *(f"{count} pairs" for count in decisions)], rows)


if __name__ == "__main__":
    main()
