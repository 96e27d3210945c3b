"""Routers live: the default router compared with others on this machine, on the same traces.

The servers of all routers are started before anything is measured, and idle while another one is measured. A
round is a trace of benchmarks/papers/pairs.py with another seed, which every router serves, in random order.
Differences and ratios are of the same round; their means and medians have 95 % bootstrap intervals over
rounds. Goodput counts requests that meet both targets.

    python -m benchmarks.papers.routers_live --rounds 6
    python -m benchmarks.papers.routers_live --rounds 6 --first 6 --add      # six more, with other seeds
"""

import argparse
import asyncio
import json
import random
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from benchmarks.options import parse, results_folder
from benchmarks.papers.pairs import DEFAULT, WorkloadRequest, summary, trace
from benchmarks.papers.pairs_live import prompt, serving, times
from benchmarks.report import table, write
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import Slo

ROUTERS = (DEFAULT, "round-robin", "flowguard-as-published")
TRACES = ("skewed", "shared")
PLACES: dict[str, dict[str, int]] = {"pairs": {"pairs": 2}, "workers": {"workers": 2}}
LONGEST = 1400
"""Maximum tokens of a prompt."""


async def serve_trace(
    llm: AsyncLLM, requests: list[WorkloadRequest], targets: tuple[float, float], name: str
) -> dict[str, float]:
    """Serve a trace at its times; return p95 TTFT in seconds, output tokens and good requests a second."""
    slo = Slo(ttft_ms=1e3 * targets[0], tpot_ms=1e3 * targets[1])
    began = time.monotonic() + 0.1 - requests[0].at

    async def one(number: int, request: WorkloadRequest) -> list[float]:
        await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
        tokens = [300 + token for token in request.prompt[:LONGEST]]
        return await times(llm, tokens, request.output, f"{name}-{number}", slo=slo)

    seen = await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
    first = [at[1] - at[0] for at in seen]
    each = [(at[-1] - at[1]) / max(len(at) - 2, 1) for at in seen]
    met = [ttft <= targets[0] and tpot <= targets[1] for ttft, tpot in zip(first, each, strict=True)]
    span = max(at[-1] for at in seen) - min(at[0] for at in seen)
    return {
        "ttft_p95": float(np.percentile(first, 95)),
        "tokens_per_second": sum(len(at) - 1 for at in seen) / span,
        "attainment": float(np.mean(met)),
        "goodput": sum(met) / span,
    }


Rounds = dict[str, list[dict[str, dict[str, float]]]]
"""The measurements of every round by trace and router."""
VARIABLE = ("rounds", "first", "traces", "add")
"""Settings in which the rounds of one result file may differ."""


async def measure(args: argparse.Namespace) -> Rounds:
    """Return the measurements of every round by trace and router."""
    measured: Rounds = {kind: [] for kind in args.traces}
    async with AsyncExitStack() as stack:
        running = {
            router: await stack.enter_async_context(
                serving(args.model, router=router, threads=1, num_blocks=2000, **PLACES[args.places])
            )
            for router in ROUTERS
        }
        for router, llm in running.items():
            for number in range(4):
                await times(llm, prompt(random.Random(number), 600), 8, f"warm-{router}-{number}")
        for seed in range(args.first, args.first + args.rounds):
            for kind in args.traces:
                requests, results = trace(kind, args.requests, args.rate, seed), {}
                for router in random.Random(f"{kind}/{seed}").sample(ROUTERS, len(ROUTERS)):
                    results[router] = await serve_trace(
                        running[router], requests, tuple(args.targets), f"{kind}-{seed}"
                    )
                measured[kind].append({router: results[router] for router in ROUTERS})
                print(seed, kind, {r: round(1e3 * one["ttft_p95"]) for r, one in results.items()}, flush=True)
    return measured


def recorded(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a result file's content. Raises SystemExit if its rounds were measured with other settings."""
    read = json.loads((results_folder() / f"{name}.json").read_text())
    before = {key: value for key, value in read["settings"].items() if key not in VARIABLE}
    if before != settings:
        raise SystemExit(f"{name}.json was measured with {before}, not with {settings}: leave out --add")
    return dict(read)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--places", choices=PLACES, default="pairs")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first round")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--add", action="store_true", help="keep the rounds of the result file")
    parser.add_argument("--requests", type=int, default=40, help="requests of a trace")
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second")
    parser.add_argument(
        "--targets",
        type=float,
        nargs=2,
        default=[0.15, 0.03],
        help="target seconds: first token, each further token",
    )
    parser.add_argument("--name", default="routers_live", help="name of the result file")
    args = parse(parser, rounds=1, requests=4)
    settings = {key: value for key, value in vars(args).items() if key not in VARIABLE} | {"time": "live"}
    parts, before = [], {}
    if args.add:
        read = recorded(args.name, settings)
        before = read["figures"]["rounds"]
        part = {"commit": read["commit"], "rounds": read["settings"]["rounds"]}
        parts = [*read["figures"].get("parts", []), part]
    new = asyncio.run(measure(args))
    measured = {
        kind: before.get(kind, []) + new.get(kind, []) for kind in TRACES if kind in before or kind in new
    }
    traces: dict[str, Any] = {kind: summary(rounds) for kind, rounds in measured.items()}
    for kind, of_routers in traces.items():
        rows = [
            [name, f"{1e3 * one['ttft_p95']:.0f}", f"{one['attainment']:.0%}", f"{one['goodput']:.1f}",
             "{value:.2f} ({low:.2f}-{high:.2f})".format(**one["ratio"]),
             "{value:+.1%} ({low:+.1%} to {high:+.1%})".format(**one["difference"])]
            for name, one in of_routers.items()
        ]  # fmt: skip
        head = [
            "router",
            "p95 TTFT, ms",
            "attainment",
            "goodput",
            f"p95 {DEFAULT} / it",
            "goodput, difference",
        ]
        table(f"{kind}, 2 {args.places}", head, rows)
    counts = {kind: len(rounds) for kind, rounds in measured.items()}
    figures = {"traces": traces, "rounds": measured}
    if args.add:
        figures |= {"parts": parts, "added": {kind: summary(rounds) for kind, rounds in new.items()}}
    write(args.name, {**settings, "rounds": counts}, figures, [args.model])


if __name__ == "__main__":
    main()
