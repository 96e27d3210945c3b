"""Prompt streams: time to first token by policy, load and memory, on both of Stream2LLM's workloads.

Virtual time runs the real engine and fleet on a cost curve. Rows: no streaming (each prompt sent when it is
complete), naive streaming (order of arrival, the query computed after every change, evicted KV recomputed),
then every order with every eviction policy. Loads are shares of the prefill capacity, measured the same way.
Under pressure the chunks' delays are multiplied, so that the prompt streams need more memory than there is.
Profiles: every eviction policy on several kinds of hardware. Tight: the same with a fifth of the memory, in
which replaced prompts are evicted, at rates of copying where it is cheaper to recompute some and to swap
others. Two rows are bounds, not policies: the default order with memory for all, and each prompt alone on the
machine.

    python -m benchmarks.papers.streaming                                  # whole grid, virtual time: an hour
    python -m benchmarks.papers.streaming --quick --seeds 3 --parts append # main rows of one part
    python -m benchmarks.papers.streaming --seconds 200                    # part; run again to go on
    python -m benchmarks.papers.streaming --live http://127.0.0.1:8000     # over HTTP
    python -m benchmarks.papers.streaming --trace mine.jsonl               # format: see arriving_traces.py
    python -m benchmarks.papers.streaming --save crawler.jsonl             # write the append trace to a file
"""

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import msgspec

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.options import parse, results_folder
from benchmarks.papers import arriving_traces
from benchmarks.papers.arriving_replay import Machine, ReplayResult, capacity, live, merged, virtual
from benchmarks.papers.arriving_traces import TRACES, Event, Query
from benchmarks.report import SIMULATED, commit, table, write
from streamserve.contracts.cost import Line, SwapCost
from streamserve.contracts.engine_config import EngineConfig
from streamserve.protocol.config import Order
from streamserve.scheduling.eviction import Eviction

LOADS = (0.8, 0.5, 0.95)
"""Shares of the measured capacity; the main one first."""
PRESSURE = {"append": (10.0, 4.0), "update": (30.0, 2.0)}
"""The factor by which chunks are slower under pressure, and the queries a second (as published)."""
EVICTIONS: tuple[Eviction, ...] = ("recompute", "swap", "cost")
STREAMED: tuple[Order, ...] = ("arrival", "fcfs", "lcas", "mcps", "slo")
"""The orders that treat prompt streams specially."""
SCALE = 1 / 8
"""Scale of the published token counts in virtual time. Memory and steps hold proportionally fewer tokens, and
a token takes proportionally longer: seconds are unchanged."""


@dataclass(frozen=True)
class Hardware:
    """The serving hardware, with an 8 B model: seconds of a step, of each token in it, and of copying a KV
    block of 16 tokens (2 MiB) to the host or back; `blocks` of memory, and the `speed` relative to the first
    hardware."""

    name: str
    step: float
    token: float
    block: float
    blocks: int
    speed: float = 1.0

    def machine(self) -> Machine:
        """Return the costs for scaled tokens: there are fewer of them, and each takes longer."""
        copy = Line(1e-4, self.block / SCALE)
        return Machine(
            step=lambda tokens, context: self.step + self.token / SCALE * tokens + 1e-8 * context,
            swap=SwapCost(copy, copy),
        )


HARDWARE = (
    Hardware("two H200", 4e-3, 2e-5, 8e-5, 100_000),
    Hardware("two H200, slow copies", 4e-3, 2e-5, 7e-4, 100_000),
    Hardware("two H200, even", 4e-3, 2e-5, 1.75e-4, 100_000),
    Hardware("A40", 4e-3, 2e-4, 8e-5, 10_000, speed=0.108),
)
"""45,000 prompt tokens a second in steps of 2,048: an estimate, with which four of the crawler's queries a
second are load 0.8 and wait 0.6 s in a plain queue (median, as published); 80 % of 282 GB without 16 GB of
weights; copies of 25, 3 and 12 GB/s. The A40 takes ten times as long for a token, as published, and holds a
tenth."""
TIGHT = (
    Hardware("a fifth of the memory", 4e-3, 2e-5, 8e-5, 20_000),
    Hardware("a fifth of the memory, 15 GB/s", 4e-3, 2e-5, 1.3e-4, 20_000),
)
"""Two H200 with little memory left for KV, also with slower copies. A block takes 0.35 ms to compute, and
0.08 or 0.13 ms to copy in each direction; what an edit will invalidate is copied out as well. So swapping
is cheaper for a prompt stream of which more than 0.3 or 0.6 is expected to survive."""
PAPER = HARDWARE[0]
"""Under pressure, prompt streams need twice its memory: four queries a second, arriving over 99 seconds."""
AMPLE = 10 * PAPER.blocks

ENGINE = EngineConfig(
    num_blocks=1, max_model_len=1 << 18, max_num_seqs=4096,
    max_num_batched_tokens=int(2048 * SCALE), max_chunk=int(2048 * SCALE),
)  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """One row: whether prompts are streamed, their service order, and the eviction policy."""

    name: str
    order: Order = "arrival"
    eviction: Eviction = "recompute"
    streaming: bool = True
    query_last: bool = True


NONE = Policy("no streaming", streaming=False)
NAIVE = Policy("naive", query_last=False)
DEFAULT = Policy("slo cost", "slo", "cost")
UNBOUNDED = Policy("slo, memory for all", "slo")
ALONE = Policy("slo, alone", "slo")
APART = 1 / 64
"""Share of the request rate at which prompts hardly ever overlap."""
ORDER_ALONE = Policy("slo, no streaming", "slo", streaming=False)
"""The default order for prompts that arrive complete."""


def policies(evictions: Sequence[Eviction], bounds: Sequence[Policy], quick: bool) -> list[Policy]:
    """Return the main rows and the bounds; unless `quick`, also every order with these eviction policies."""
    main = [NONE, DEFAULT, NAIVE, *bounds]
    grid = [Policy(f"{order} {way}", order, way) for order in STREAMED for way in evictions]
    return main if quick else main + [policy for policy in [ORDER_ALONE, *grid] if policy not in main]


def run(
    queries: Sequence[Query], rate: float, policy: Policy, blocks: int, hardware: Hardware = PAPER
) -> ReplayResult:
    """Run a trace in virtual time, with this many `blocks` of memory before scaling."""
    blocks = round(blocks * SCALE)
    engine = msgspec.structs.replace(
        ENGINE,
        num_blocks=blocks,
        order=policy.order,
        eviction=policy.eviction,
        swap_blocks=4 * blocks if policy.eviction != "recompute" else 0,
    )
    return virtual(queries, rate, engine, hardware.machine(), policy.streaming, policy.query_last)


def scaled(query: Query) -> Query:
    """Return the query with SCALE times its tokens."""

    def few(tokens: int) -> int:
        return max(1, round(SCALE * tokens))

    events = [
        Event(event.after, [(kind, index, few(tokens)) for kind, index, tokens in event.edits])
        for event in query.events
    ]
    return replace(query, query=few(query.query), events=events)


def measured_capacity(queries: Sequence[Query]) -> float:
    """Return prompt tokens a second when all prompts arrive at once, each answered with one token."""
    at_once = [
        replace(query, at=0.0, output=1, events=[replace(event, after=0.0) for event in query.events])
        for query in queries
    ]
    done = run(at_once, 1.0, NONE, AMPLE)
    return sum(query.tokens for query in queries) / done.completion


def figures(done: ReplayResult) -> dict[str, Any]:
    """Return the results of a run as they are reported."""
    ttft = sorted(done.ttft)
    measured = {
        "p50": statistics.median(ttft),
        "p95": ttft[int(0.95 * (len(ttft) - 1))],
        "p99": ttft[int(0.99 * (len(ttft) - 1))],
        "mean": statistics.fmean(ttft),
        "completion": done.completion,
    }
    if done.reports:
        streams = [report.streams for report in done.reports if report.streams]
        evictions = [report.evictions for report in done.reports if report.evictions]
        measured |= {
            "preemptions": sum(report.preemptions for report in done.reports),
            "swaps": sum(one.swaps for one in evictions),
            "recomputes": sum(one.recomputes for one in evictions),
            "early_share": sum(one.computed_before for one in streams)
            / max(sum(one.tokens for one in streams), 1),
            "invalidated_tokens": sum(one.invalidated for one in streams),
        }
    points = [ttft[round(i * (len(ttft) - 1) / 200)] for i in range(201)]
    tail = ttft[int(0.98 * len(ttft)) :]
    return measured | {"requests": len(ttft), "quantiles": _short(points), "tail": _short(tail)}


def _short(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


Result = tuple[str, str, dict[str, Any]]
"""One result: its setting, its policy, and the measured values."""
Results = dict[str, dict[str, dict[str, Any]]]
"""Results by setting and policy."""


Trace = Callable[[int], list[Query]]
"""Returns the queries of a seed."""


Selection = Callable[[str, str], bool]
"""Return whether the row of a setting and a policy has yet to be run."""


def grid(
    trace: Trace, kind: str, seeds: Sequence[int], quick: bool, is_selected: Selection
) -> Iterator[Result]:
    """Run every order at every load, with memory for all: nothing is evicted, so the eviction policy has no
    effect."""
    traces = [trace(seed) for seed in seeds]
    rates = [
        measured_capacity(queries) / statistics.fmean(query.tokens for query in queries) for queries in traces
    ]
    for load in LOADS if not quick else LOADS[:1]:
        for policy in policies(["cost"], [ALONE] if load == LOADS[0] else [], quick):
            if not is_selected(f"{kind} {load}", policy.name):
                continue
            share = load * (APART if policy is ALONE else 1.0)
            runs = [
                run(queries, share * rate, policy, PAPER.blocks)
                for queries, rate in zip(traces, rates, strict=True)
            ]
            yield f"{kind} {load}", policy.name, figures(merged(runs))


def pressure(
    trace: Trace, kind: str, seeds: Sequence[int], quick: bool, is_selected: Selection
) -> Iterator[Result]:
    """Run every order with every eviction policy where chunks are slow, and memory is too small for the open
    prompts."""
    delay, rate = PRESSURE[kind]
    traces = [trace(seed) for seed in seeds]
    for policy in policies(EVICTIONS, [UNBOUNDED, ALONE], quick):
        if not is_selected(f"{kind} ×{delay:g}", policy.name):
            continue
        blocks = AMPLE if policy is UNBOUNDED else PAPER.blocks
        share = APART if policy is ALONE else 1.0
        runs = [run(queries, share * rate, policy, blocks) for queries in traces]
        yield f"{kind} ×{delay:g}", policy.name, figures(merged(runs))


def profiles(
    trace: Trace, kind: str, seeds: Sequence[int], machines: Sequence[Hardware], is_selected: Selection
) -> Iterator[Result]:
    """Run every eviction policy on each of these machines, in the default order."""
    delay, rate = PRESSURE[kind]
    traces = [trace(seed) for seed in seeds]
    for hardware in machines:
        for way in EVICTIONS:
            policy, setting = Policy(way, "slo", way), f"{kind} ×{delay:g}, {hardware.name}"
            if not is_selected(setting, way):
                continue
            runs = [
                run(queries, rate * hardware.speed, policy, hardware.blocks, hardware) for queries in traces
            ]
            yield setting, way, figures(merged(runs))


def show(results: Results) -> None:
    """Print one table for each setting: seconds, and speed-ups over no streaming."""
    for setting, rows in results.items():
        base = rows.get(NONE.name) or next(iter(rows.values()))
        lines = [
            [
                name,
                *(f"{one[key]:.3f}" for key in ("mean", "p50", "p95", "p99")),
                *(f"{base[key] / one[key]:.2f}" for key in ("p50", "p95", "p99")),
                f"{one['completion'] / base['completion'] - 1:+.1%}",
                str(one.get("swaps", "")),
                str(one.get("recomputes", "")),
            ]
            for name, one in rows.items()
        ]
        columns = ["policy", "mean, s", "p50, s", "p95, s", "p99, s", "p50 ×", "p95 ×", "p99 ×"]
        table(setting, [*columns, "completion", "swapped", "recomputed"], lines)


def plot(results: Results, path: Path) -> None:
    """Plot for each time the share of prompts whose first token took longer."""
    columns = (len(results) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(4 * columns, 7), squeeze=False)
    for axis, (setting, rows) in zip(axes.flat, results.items(), strict=False):
        for name, one in rows.items():
            points = one["quantiles"][:-4]
            share = [1 - i / 200 for i in range(len(points))]
            tail = one["tail"]
            share += [0.02 * (1 - i / len(tail)) for i in range(len(tail))]
            width = 2.2 if name in (NONE.name, NAIVE.name, DEFAULT.name) else 0.8
            axis.plot([max(value, 1e-3) for value in points + tail], share, label=name, linewidth=width)
        axis.set(title=setting, xscale="log", yscale="log", xlabel="time to first token, s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=5)
    axes.flat[0].set_ylabel("share that took longer")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def over_http(
    url: str, arrival: str | None, traces: dict[str, list[Query]], done: Callable[[Results], object]
) -> Results:
    """Run no streaming and streaming against a server, at load 0.8 of its measured capacity; and streaming
    against a server that was started with --order arrival, if there is one. A token is a word here. `done` is
    called with the results after each row."""
    results: Results = {}
    for kind, queries in traces.items():
        words = statistics.fmean(query.tokens for query in queries)
        await capacity(url, round(words), 2)  # warm up
        rate = LOADS[0] * await capacity(url, round(words)) / words
        print(f"{kind}: {words:.0f} words a query, {rate:.2f} queries a second", flush=True)
        servers = {NONE.name: url, "slo": url} | ({"arrival": arrival} if arrival else {})
        for name, server in servers.items():
            measured = figures(await live(queries, rate, server, streaming=name != NONE.name))
            results.setdefault(f"live {kind} {LOADS[0]}", {})[name] = measured
            print(f"{name}: " + " ".join(f"{key} {measured[key]:.3f}" for key in ("p50", "p95")), flush=True)
            done(results)
    return results


PARTS = (
    "append", "update", "append-pressure", "update-pressure", "append-profiles", "update-profiles",
    "update-tight",
)  # fmt: skip
SERVED = ("unknown",)
"""The model name for results of a server that is given by its URL."""
COUNTS = {
    "append": 1500, "append-pressure": 2000, "append-profiles": 1000,
    "update": 500, "update-pressure": 500, "update-profiles": 300, "update-tight": 40,
}  # fmt: skip
"""Number of queries, large enough for the number of prompt streams to reach its maximum. The paper had 4,322
and 500."""


def part(
    name: str, args: argparse.Namespace, own: list[Query] | None, is_selected: Selection
) -> Iterator[Result]:
    """Run one part of the grid."""
    kind, _, what = name.partition("-")
    count, seeds = args.queries or COUNTS[name], range(args.seed, args.seed + args.seeds)
    delay = PRESSURE[kind][0] if what else 1.0

    def trace(seed: int) -> list[Query]:
        return [scaled(query) for query in own] if own else TRACES[kind](count, seed, SCALE, delay)

    if what == "pressure":
        return pressure(trace, kind, seeds, args.quick, is_selected)
    if what:
        machines = TIGHT if what == "tight" else HARDWARE
        return profiles(trace, kind, seeds, machines, is_selected)
    return grid(trace, kind, seeds, args.quick, is_selected)


def known(file: str, settings: dict[str, str]) -> Results:
    """Return the rows that were run earlier with the same settings."""
    path = results_folder() / f"{file}.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    return dict(report["figures"]) if report.get("settings") == settings else {}


def run_part(name: str, args: argparse.Namespace, own: list[Query] | None, until: float) -> None:
    """Run or resume one part, print it and write it. No row starts after `until`."""
    file = f"streaming-{'own' if own else name}{'-main' if args.quick else ''}"
    settings = {key: str(vars(args)[key]) for key in ("queries", "seed", "seeds", "quick", "trace")}
    results = known(file, settings) if args.seconds else {}

    def is_selected(setting: str, policy: str) -> bool:
        return time.monotonic() < until and policy not in results.get(setting, {})

    begun = time.monotonic()
    for setting, policy, one in part(name, args, own, is_selected):
        took, begun = time.monotonic() - begun, time.monotonic()
        results.setdefault(setting, {})[policy] = one | {"commit": commit(), "took": round(took, 1)}
        seconds = " ".join(f"{key} {one[key]:.3f}" for key in ("p50", "p95", "p99"))
        print(f"{setting:14s} {policy:18s} {seconds}  ({took:.0f} s)", flush=True)
        write(file, settings, results, SIMULATED)
    show(results)
    plot(results, results_folder() / f"{file}.png")


def main() -> None:
    """Run the selected parts, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--queries", type=int, help="queries of a trace (default: enough for the maximum of prompt streams)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="number of traces; results combine all traces")
    parser.add_argument("--quick", action="store_true", help="run only the main rows")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, help="start no row after this time; earlier rows are kept")
    parser.add_argument("--live", metavar="URL")
    parser.add_argument("--arrival", metavar="URL", help="address of a server that runs with --order arrival")
    parser.add_argument("--scale", type=float, default=0.1, help="factor for the trace's tokens, over HTTP")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--save", type=Path)
    args = parse(parser, queries=4, quick=True, parts=["append"])
    if args.save:
        arriving_traces.write(args.save, TRACES["append"](args.queries or COUNTS["append"], args.seed))
        return
    settings = {key: str(value) for key, value in vars(args).items()}
    if args.live:
        count = args.queries or 60
        traces = (
            {"own": arriving_traces.read(args.trace)}
            if args.trace
            else {kind: TRACES[kind](count, args.seed, args.scale) for kind in TRACES if kind in args.parts}
        )
        file = "-".join(["streaming-live", *(traces if len(traces) == 1 else [])])
        done = partial(write, file, settings, models=SERVED)
        live_results = asyncio.run(over_http(args.live, args.arrival, traces, done))
        show(live_results)
        plot(live_results, results_folder() / f"{file}.png")
        return
    own = arriving_traces.read(args.trace) if args.trace else None
    until = time.monotonic() + (args.seconds or math.inf)
    for name in PARTS[:1] if own else args.parts:
        run_part(name, args, own, until)


if __name__ == "__main__":
    main()
