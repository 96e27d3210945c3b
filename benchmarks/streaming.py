"""Prompts that arrive: time to first token by policy, load and memory, on both of Stream2LLM's workloads.

Virtual time runs the real engine and fleet on a cost curve. Rows: no streaming (each prompt sent when it is
complete), naive streaming (order of arrival, the query computed after every change, evicted KV computed
again), then every order with every eviction. Loads are shares of the prefill capacity, measured the same way.
Under pressure the chunks' delays are multiplied, so that more prompts are open than memory holds.

    python -m benchmarks.streaming                              # the grid, in virtual time
    python -m benchmarks.streaming --quick                      # main rows only
    python -m benchmarks.streaming --live http://127.0.0.1:8000 # no streaming and streaming, over HTTP
    python -m benchmarks.streaming --trace mine.jsonl           # your own trace (format: arriving_traces)
    python -m benchmarks.streaming --save crawler.jsonl         # write the append trace to a file
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import msgspec

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import arriving_traces
from benchmarks.arriving_replay import Machine, Replayed, capacity, live, virtual
from benchmarks.arriving_traces import TRACES, Query
from benchmarks.report import RESULTS, table, write
from streamserve.policy.cost import Line, SwapCost
from streamserve.policy.eviction import Eviction
from streamserve.policy.order import ORDERS, Order
from streamserve.protocol.config import EngineConfig

LOADS = (0.5, 0.8, 0.95)
PRESSURE = {"append": 10.0, "update": 30.0}
"""By how much chunks are slower under pressure (the paper's factors)."""
EVICTIONS: tuple[Eviction, ...] = ("recompute", "swap", "cost")
AMPLE, SCARCE = 100_000, 12_000
"""Blocks of 16 tokens: memory for all, and under pressure."""

MACHINE = Machine(
    step=lambda rows, context: 4e-3 + 4e-5 * rows + 1e-8 * context,
    swap=SwapCost(Line(1e-4, 8e-5), Line(1e-4, 8e-5)),
)
"""Some 8 B parameters on one large accelerator: 25,000 prompt tokens a second, 25 GB/s to the host."""

ENGINE = EngineConfig(num_blocks=AMPLE, max_model_len=1 << 18, max_num_seqs=4096)


@dataclass(frozen=True)
class Policy:
    """One row: whether prompts are streamed, in which order they go, what becomes of evicted KV."""

    name: str
    order: Order = "arrival"
    eviction: Eviction = "recompute"
    streaming: bool = True
    query_last: bool = True


NONE = Policy("no streaming", streaming=False)
NAIVE = Policy("naive", query_last=False)
DEFAULT = Policy("fcfs cost", "fcfs", "cost")


def policies(evictions: Sequence[Eviction]) -> list[Policy]:
    """The baselines and every order with these evictions."""
    grid = [Policy(f"{order} {way}", order, way) for order in ORDERS for way in evictions]
    return [NONE, NAIVE, *grid]


def run(queries: Sequence[Query], rate: float, policy: Policy, blocks: int) -> Replayed:
    """Play a trace in virtual time."""
    engine = msgspec.structs.replace(
        ENGINE,
        num_blocks=blocks,
        order=policy.order,
        eviction=policy.eviction,
        swap_blocks=4 * blocks if policy.eviction != "recompute" else 0,
    )
    return virtual(queries, rate, engine, MACHINE, policy.streaming, policy.query_last)


def measured_capacity(queries: Sequence[Query]) -> float:
    """Prompt tokens a second when all prompts are there at once, each answered with one token."""
    at_once = [
        replace(query, at=0.0, output=1, events=[replace(event, after=0.0) for event in query.events])
        for query in queries
    ]
    done = run(at_once, 1.0, NONE, AMPLE)
    return sum(query.tokens for query in queries) / done.completion


def figures(done: Replayed) -> dict[str, Any]:
    """What is written of a run."""
    ttft = sorted(done.ttft)
    report = done.report
    return {
        "p50": statistics.median(ttft),
        "p95": ttft[int(0.95 * (len(ttft) - 1))],
        "p99": ttft[int(0.99 * (len(ttft) - 1))],
        "mean": statistics.fmean(ttft),
        "completion": done.completion,
        "preemptions": report.preemptions if report else None,
        "ttft": [round(value, 5) for value in ttft],
    }


def grid(
    count: int, seed: int, quick: bool, own: list[Query] | None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(setting, policy, figures) of every run."""
    for kind, make in TRACES.items():
        plain = own or make(count, seed)
        tokens = statistics.fmean(query.tokens for query in plain)
        whole = measured_capacity(plain)
        for load in LOADS if not quick else LOADS[1:2]:
            for policy in policies(["cost"]) if not quick else [NONE, NAIVE, DEFAULT]:
                yield f"{kind} {load}", policy.name, figures(run(plain, load * whole / tokens, policy, AMPLE))
        if own:
            return
        slow = make(count, seed, delay=PRESSURE[kind])
        for policy in policies(EVICTIONS) if not quick else [NONE, NAIVE, DEFAULT]:
            done = run(slow, LOADS[1] * whole / tokens, policy, SCARCE)
            yield f"{kind} ×{PRESSURE[kind]:g}", policy.name, figures(done)


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """A table a setting: seconds, and how many times better than no streaming."""
    for setting, rows in results.items():
        base = rows[NONE.name]
        lines = [
            [
                name,
                *(f"{one[key]:.3f}" for key in ("p50", "p95", "p99")),
                *(f"{base[key] / one[key]:.2f}" for key in ("p50", "p95", "p99")),
                f"{one['completion'] / base['completion'] - 1:+.1%}",
                str(one["preemptions"]),
            ]
            for name, one in rows.items()
        ]
        columns = ["policy", "p50, s", "p95, s", "p99, s", "p50 ×", "p95 ×", "p99 ×", "completion", "evicted"]
        table(setting, columns, lines)


def plot(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """The share of prompts whose first token took longer."""
    figure, axes = plt.subplots(2, (len(results) + 1) // 2, figsize=(4 * ((len(results) + 1) // 2), 7))
    for axis, (setting, rows) in zip(axes.flat, results.items(), strict=False):
        for name, one in rows.items():
            share = [1 - number / len(one["ttft"]) for number in range(len(one["ttft"]))]
            width = 2.2 if name in (NONE.name, NAIVE.name, DEFAULT.name) else 0.8
            axis.plot([max(value, 1e-3) for value in one["ttft"]], share, label=name, linewidth=width)
        axis.set(title=setting, xscale="log", yscale="log", xlabel="time to first token, s")
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("share that took longer")
    axes.flat[-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def over_http(url: str, count: int, seed: int, scale: float) -> dict[str, dict[str, dict[str, Any]]]:
    """No streaming and streaming against a server, at load 0.8 of its own capacity."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, make in TRACES.items():
        queries = make(count, seed, scale)
        tokens = statistics.fmean(query.tokens for query in queries)
        rate = LOADS[1] * await capacity(url, round(tokens)) / tokens
        rows = results.setdefault(f"live {kind} {LOADS[1]}", {})
        for name, streaming in ((NONE.name, False), ("streaming", True)):
            rows[name] = figures(await live(queries, rate, url, streaming))
    return results


def main() -> None:
    """Run what is asked for, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--live", metavar="URL")
    parser.add_argument("--scale", type=float, default=0.1, help="of the tokens, over HTTP")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.save:
        arriving_traces.write(args.save, TRACES["append"](args.queries, args.seed))
        return
    results: dict[str, dict[str, dict[str, Any]]] = {}
    if args.live:
        results = asyncio.run(over_http(args.live, args.queries, args.seed, args.scale))
    else:
        own = arriving_traces.read(args.trace) if args.trace else None
        for setting, name, one in grid(args.queries, args.seed, args.quick, own):
            results.setdefault(setting, {})[name] = one
            print(
                f"{setting:14s} {name:16s} p50 {one['p50']:.3f} p95 {one['p95']:.3f} p99 {one['p99']:.3f}",
                flush=True,
            )
    show(results)
    name = "streaming_live" if args.live else "streaming"
    print(write(name, {key: str(value) for key, value in vars(args).items()}, results))
    plot(results, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
