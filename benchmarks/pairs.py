"""Routers over stream pairs, in virtual time: the same Fleet and Engines as live, on an A100-like cost curve.

Three traces: requests of a few groups that share a long head (`shared`), prompts of very different lengths
(`skewed`), and arrivals in bursts (`bursty`). Every router plays the same requests; figures are medians over
seeds with a bootstrap interval of the ratio to round-robin.

    python -m benchmarks.pairs --pairs 2 4 16 --seeds 20
"""

import argparse
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, table, write
from benchmarks.slo_costs import a100
from streamserve.control.events import Deliver, Open
from streamserve.control.fleet import FleetConfig
from streamserve.control.workers import pairs
from streamserve.policy.routing import ROUTERS, Costs, Predictive, Router
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import ModelInfo, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation

TRACES = ("shared", "skewed", "bursty")
OUTPUT = (16, 64)
ENGINE = EngineConfig(
    num_blocks=1500, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=512, max_chunk=512
)
MODEL = ModelInfo(
    architecture="pretended", parameters=0, vocab_size=1000, max_model_len=4096, eos_token_ids=(),
    weight_bytes=0, dtype="none", row_invariant=True, fingerprint="pretended",
)  # fmt: skip
TARGETS = (1.0, 0.025)
"""The targets, in seconds, by which attainment is counted: time to the first token, time per further one."""


@dataclass(frozen=True)
class Asked:
    """One request of a trace."""

    at: float
    prompt: list[int]
    output: int


def trace(kind: str, count: int, rate: float, seed: int) -> list[Asked]:
    """`count` requests at `rate` a second."""
    rng = random.Random(f"{kind}/{seed}")
    heads = [[rng.randrange(1000) for _ in range(1024)] for _ in range(8)]
    asked, at = [], 1.5
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
        asked.append(Asked(at, prompt, rng.randint(*OUTPUT)))
    return asked


def routers() -> dict[str, Router]:
    """All routers; the predictive one knows the curve that the simulation costs by."""
    step = a100().step
    costs = Costs(lambda tokens: step(max(tokens, 1), 0), step, ENGINE.block_size)
    return {**ROUTERS, "predictive": Predictive(costs, output=sum(OUTPUT) // 2)}


def play(router: Router, count: int, asked: Sequence[Asked]) -> dict[str, float]:
    """p95 time to first token, output tokens a second, attainment, and what was sent between workers."""
    fleet = FleetConfig(topology=pairs(count), router=router)
    simulation = Simulation(fleet, ENGINE, MODEL, a100().step, wire_seconds=1e-4)
    for number, one in enumerate(asked):
        params = SamplingParams(temperature=0, max_tokens=one.output, seed=0)
        simulation.at(one.at, Open(f"r{number}", one.prompt, params))
    times: dict[str, list[float]] = {}
    for given in simulation.run():
        assert isinstance(given.what, Deliver)
        times.setdefault(given.what.request, []).extend(
            given.time for event in given.what.events if isinstance(event, Token)
        )
    first = [times[f"r{number}"][0] - one.at for number, one in enumerate(asked)]
    each = [(t[-1] - t[0]) / max(len(t) - 1, 1) for t in (times[f"r{n}"] for n in range(len(asked)))]
    met = [ttft <= TARGETS[0] and tpot <= TARGETS[1] for ttft, tpot in zip(first, each, strict=True)]
    span = max(t[-1] for t in times.values()) - asked[0].at
    reports = [worker.engine.report().transfer for worker in simulation.workers.values()]
    return {
        "ttft_p95": float(np.percentile(first, 95)),
        "tokens_per_second": sum(one.output for one in asked) / span,
        "attainment": float(np.mean(met)),
        "handed_over": float(sum(report.handed_over for report in reports if report)),
    }


def seed_figures(count: int, kind: str, requests: int, rate: float, seed: int) -> dict[str, dict[str, float]]:
    """Every router on one trace."""
    asked = trace(kind, requests * count, rate * count, seed)
    return {name: play(router, count, asked) for name, router in routers().items()}


def summary(found: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Medians over seeds, and the ratio of p95 TTFT to round-robin's with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    summed: dict[str, dict[str, Any]] = {}
    for name in found[0]:
        medians = {key: float(np.median([one[name][key] for one in found])) for key in found[0][name]}
        ratios = np.array([one[name]["ttft_p95"] / one["round-robin"]["ttft_p95"] for one in found])
        drawn = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        summed[name] = {**medians, "ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}
    return summed


def plot(figures: Sequence[dict[str, Any]]) -> None:
    """One panel a trace: the ratio of p95 TTFT to round-robin's, by pairs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, panels = plt.subplots(1, len(TRACES), figsize=(13, 4), sharey=True)
    for panel, kind in zip(panels, TRACES, strict=True):
        of_kind = [one for one in figures if one["trace"] == kind]
        for name in of_kind[0]["routers"] if of_kind else []:
            shown = [one["routers"][name]["ratio"] for one in of_kind]
            panel.plot([one["pairs"] for one in of_kind], shown, marker="o", label=name)
        panel.set(title=kind, xlabel="stream pairs", xscale="log")
    panels[0].set_ylabel("p95 TTFT / round-robin's")
    panels[-1].legend(fontsize=7)
    canvas.tight_layout()
    canvas.savefig(RESULTS / "pairs.png", dpi=110)


def main() -> None:
    """Play, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=40, help="requests a pair")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second a pair")
    args = parser.parse_args()
    figures = []
    with ProcessPoolExecutor(2) as pool:
        for kind in TRACES:
            for count in args.pairs:
                one: Callable[[int], Any] = partial(seed_figures, count, kind, args.requests, args.rate)
                found = list(pool.map(one, range(args.seeds)))
                figures.append({"trace": kind, "pairs": count, "routers": summary(found)})
                rows = [
                    [name, f"{f['ttft_p95'] * 1e3:.0f}", f"{f['ratio']:.2f} ({f['low']:.2f}-{f['high']:.2f})",
                     f"{f['tokens_per_second']:.0f}", f"{f['attainment']:.0%}"]
                    for name, f in figures[-1]["routers"].items()
                ]  # fmt: skip
                columns = ["router", "p95 TTFT, ms", "of round-robin's", "tokens/s", "attainment"]
                table(f"{kind}, {count} pairs (simulated, A100-like)", columns, rows)
    settings = {**vars(args), "curve": a100().note, "targets": TARGETS, "time": "virtual"}
    print(write("pairs", settings, figures))
    plot(figures)


if __name__ == "__main__":
    main()
