"""Routers over stream pairs, in virtual time: the same Fleet and Engines as live, on an A100-like cost curve.

Three traces: requests of a few groups that share a long prefix (`shared`), prompts of very different lengths
(`skewed`), and arrivals in bursts (`bursty`). Every router serves the same requests; results are medians over
seeds with bootstrap intervals: of each router's ratio to round-robin, and of our claims (flowguard against
round-robin, random and least-loaded; predictive against flowguard on attainment). Also the time of a routing
decision, in real time, with and without the fleet's bookkeeping.

    python -m benchmarks.pairs --pairs 2 4 16 --seeds 20

New results are merged with those in the result file for other traces and numbers of pairs.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, SIMULATED, table, write
from benchmarks.slo_costs import a100
from streamserve.baselines.routers import PUBLISHED_WEIGHTS, ROUTERS
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Close, Deliver, Open, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import PROTOCOL_VERSION, CostCurve, ModelInfo, Ready, Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.scheduling.flowguard import FlowGuard
from streamserve.scheduling.predictive import Predictive
from streamserve.scheduling.routing import (
    Arrival,
    Decision,
    RouteCandidate,
    Router,
)
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec

TRACES = ("shared", "skewed", "bursty")
OUTPUT = (16, 64)
ENGINE = EngineConfig(
    num_blocks=1500, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=512, max_chunk=512
)
MODEL = ModelInfo(
    architecture="simulated", parameters=0, vocab_size=1000, max_model_len=4096, eos_token_ids=(),
    weight_bytes=0, dtype="none", row_invariant=True, fingerprint="simulated",
)  # fmt: skip
TARGETS = {"shared": (0.25, 0.025), "skewed": (0.25, 0.025), "bursty": (0.75, 0.025)}
"""The targets of each trace, in seconds, for attainment: time to the first token, time per further token.
They are set so that some routers miss them occasionally."""
KV_TOKEN = (a100().step(1, 1 << 20) - a100().step(1, 0)) / (1 << 20)
"""Seconds by which a KV token lengthens a simulated step."""
OPEN = 4
"""Open requests of a pair while decisions are timed."""
MAX_REQUESTS = 200
"""Maximum requests of a trace, for any number of pairs."""


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
    """Return all routers, and flowguard with the paper's weights; predictive knows how long outputs are."""
    paper = FlowGuard(PUBLISHED_WEIGHTS)
    return {
        **ROUTERS,
        "flowguard, paper's weights": paper,
        "predictive": Predictive(output=sum(OUTPUT) // 2),
    }


def simulate(
    router: Router, count: int, trace_requests: Sequence[WorkloadRequest], targets: tuple[float, float]
) -> dict[str, float]:
    """Simulate a trace with a router; return p95 time to first token, output tokens a second, attainment, and
    the bytes sent between workers."""
    fleet = FleetConfig(topology=pairs(count), router=router)
    simulation = Simulation(
        fleet, WorkerSpec(ENGINE, MODEL, a100().step, wire_seconds=1e-4, curve=_curve(1.0))
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
        "handed_over": float(sum(report.handed_over for report in reports if report)),
    }


def seed_figures(count: int, kind: str, requests: int, rate: float, seed: int) -> dict[str, dict[str, float]]:
    """Return the results of every router on one trace."""
    trace_requests = trace(kind, min(requests * count, MAX_REQUESTS), rate * count, seed)
    return {
        name: simulate(router, count, trace_requests, TARGETS[kind]) for name, router in routers().items()
    }


ResultsBySeed = list[dict[str, dict[str, float]]]
"""For each seed, the results of every router."""


def summary(measured: ResultsBySeed) -> dict[str, dict[str, Any]]:
    """Return medians over seeds, and the ratio of p95 TTFT to round-robin's."""
    return {
        name: {
            **{key: float(np.median([one[name][key] for one in measured])) for key in measured[0][name]},
            "ratio": ratio(measured, name, "round-robin", "ttft_p95"),
        }
        for name in measured[0]
    }


def claims(measured: ResultsBySeed) -> dict[str, dict[str, Any]]:
    """Return the claims about one trace: ratios of flowguard to others, and how many more of the targets
    predictive meets than flowguard."""
    others = ("round-robin", "random", "least-loaded")
    made: dict[str, dict[str, Any]] = {
        f"flowguard / {other}": {
            key: ratio(measured, "flowguard", other, key) for key in ("ttft_p95", "tokens_per_second")
        }
        for other in others
    }
    gain = [one["predictive"]["attainment"] - one["flowguard"]["attainment"] for one in measured]
    made["predictive - flowguard"] = {"attainment": interval(gain, np.mean)}
    return made


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
    """Return a worker's measurement of the simulated machine, `scale` times as slow."""
    step, rows, tokens, kv = a100().step, (1, 128, 256, 512), (0, 16_384, 65_536), 327_680
    return CostCurve(
        kv_token_bytes=kv, tokens=rows, kv_bytes=tuple(kv * held for held in tokens),
        seconds=tuple(tuple(scale * step(count, held) for held in tokens) for count in rows),
        pair_seconds=0.0, token_seconds=0.0, byte_seconds=scale * KV_TOKEN / kv,
    )  # fmt: skip


def _spread(taken: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(taken)), "p99": float(np.percentile(taken, 99))}


def plot(figures: Sequence[dict[str, Any]]) -> None:
    """Plot one panel a trace: the ratio of p95 TTFT to round-robin's, by pairs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, panels = plt.subplots(1, len(TRACES), figsize=(13, 4), sharey=True)
    for panel, kind in zip(panels, TRACES, strict=True):
        of_kind = [one for one in figures if one["trace"] == kind]
        for name in of_kind[0]["routers"] if of_kind else []:
            shown = [one["routers"][name]["ratio"]["value"] for one in of_kind]
            panel.plot([one["pairs"] for one in of_kind], shown, marker="o", label=name)
        panel.set(title=kind, xlabel="stream pairs", xscale="log")
    panels[0].set_ylabel("p95 TTFT / round-robin's")
    panels[-1].legend(fontsize=7)
    canvas.tight_layout()
    canvas.savefig(RESULTS / "pairs.png", dpi=110)


def cached(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results in the result file that were computed with these settings."""
    path = RESULTS / "pairs.json"
    if not path.exists():
        return []
    read = json.loads(path.read_text())
    same = all(read["settings"].get(key) == value for key, value in settings.items())
    return list(read["figures"]["played"]) if same else []


def show(one: dict[str, Any]) -> None:
    """Print a trace's results and the claims about them."""
    rows = [
        [name, f"{f['ttft_p95'] * 1e3:.0f}", _text(f["ratio"]), f"{f['tokens_per_second']:.0f}",
         f"{f['attainment']:.1%}"]
        for name, f in one["routers"].items()
    ]  # fmt: skip
    columns = ["router", "p95 TTFT, ms", "of round-robin's", "tokens/s", "attainment"]
    table(f"{one['trace']}, {one['pairs']} pairs (simulated, A100-like)", columns, rows)
    rows = [[name, key, _text(value)] for name, of in one["claims"].items() for key, value in of.items()]
    table("", ["", "of", "value"], rows)


def _text(measured: dict[str, float]) -> str:
    return f"{measured['value']:.3f} ({measured['low']:.3f} to {measured['high']:.3f})"


def _micros(taken: dict[str, float]) -> str:
    return f"{taken['median'] * 1e6:.0f} ({taken['p99'] * 1e6:.0f})"


def main() -> None:
    """Simulate, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="*", default=[2, 4, 16])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=25, help="requests a pair")
    parser.add_argument("--rate", type=float, default=9.0, help="requests a second a pair")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    settings = {
        "seeds": args.seeds, "requests": args.requests, "rate": args.rate, "most_requests": MAX_REQUESTS,
        "targets": {kind: list(targets) for kind, targets in TARGETS.items()},
        "curve": a100().note, "time": "virtual, but for decisions",
    }  # fmt: skip
    with ProcessPoolExecutor(args.processes) as pool:
        for kind, count in itertools.product(args.traces, args.pairs):
            one: Callable[[int], Any] = partial(seed_figures, count, kind, args.requests, args.rate)
            measured = list(pool.map(one, range(args.seeds)))
            new = {"trace": kind, "pairs": count, "routers": summary(measured), "claims": claims(measured)}
            show(new)
            others = [old for old in cached(settings) if (old["trace"], old["pairs"]) != (kind, count)]
            played = sorted([*others, new], key=lambda p: (TRACES.index(p["trace"]), p["pairs"]))
            write("pairs", settings, {"played": played, "decision_seconds": {}}, SIMULATED)
    decisions = {
        str(count): {name: decision_seconds(name, count) for name in ROUTERS} for count in (2, 16, 64)
    }
    for what in ("decision", "placing"):
        rows = [[name, *(_micros(of[name][what]) for of in decisions.values())] for name in ROUTERS]
        table(f"{what} in µs, median (p99)", ["", *(f"{count} pairs" for count in decisions)], rows)
    played = cached(settings)
    print(write("pairs", settings, {"played": played, "decision_seconds": decisions}, SIMULATED))
    plot(played)


if __name__ == "__main__":
    main()
