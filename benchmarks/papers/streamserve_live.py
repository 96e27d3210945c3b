"""StreamServe's ablation live: two stream pairs of the packaged model on this machine, with SpecuStream and
prompts that share prefixes; and systems that each leave out one of these parts.

Every system has four workers of one thread. All servers are started before anything is measured, and idle
while another one is measured. In a round every system serves the same requests, in random order, as
a closed loop at a constant concurrency. A prompt is a question of one of the packaged model's families
(held-out wordings) after one of four openings of 64 tokens. The interaction is speculation's speed-up of
pairs divided by its speed-up of unified workers, in output tokens a second. Results are medians of the ratios
within a round, with 95 % bootstrap intervals over rounds.

    python -m benchmarks.papers.streamserve_live --rounds 5
"""

import argparse
import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from benchmarks.options import parse
from benchmarks.papers.pairs import interval
from benchmarks.papers.pairs_live import serving, times
from benchmarks.report import PACKAGED_PAIR, table, write
from benchmarks.speculation.speculation import prompts
from streamserve.llm.async_llm import AsyncLLM

PAIRS: dict[str, Any] = {"pairs": 2, "router": "flowguard", "speculation_policy": "specustream"}
UNIFIED: dict[str, Any] = {"workers": 4, "router": "flowguard", "speculation_policy": "specustream"}
UNDRAFTED = {"draft": "none", "speculation_policy": "off"}
FULL = "full"
SYSTEMS: dict[str, dict[str, Any]] = {
    FULL: PAIRS,
    "w/o FlowGuard (round-robin)": PAIRS | {"router": "round-robin"},
    "w/o SpecuStream (fixed:5)": PAIRS | {"speculation_policy": "fixed:5"},
    "w/o speculation": PAIRS | UNDRAFTED,
    "w/o disaggregation": UNIFIED,
    "w/o disaggregation and speculation": UNIFIED | UNDRAFTED,
}
OPENINGS, OPENING_TOKENS = 4, 64
OUTPUTS = (32, 96)
WARM = 8
Request = tuple[list[int], int]
"""A request: its prompt, and the number of tokens of its answer."""


def requests(family: str, count: int, seed: int) -> list[Request]:
    """Return the requests of a round."""
    rng = random.Random(f"{family}/{seed}")
    other = [token for question in prompts(family, "train", seed) for token in question]
    openings = [other[n * OPENING_TOKENS : (n + 1) * OPENING_TOKENS] for n in range(OPENINGS)]
    questions = prompts(family, "heldout", seed)
    return [(rng.choice(openings) + rng.choice(questions), rng.randint(*OUTPUTS)) for _ in range(count)]


async def closed_loop(llm: AsyncLLM, given: list[Request], at_once: int, name: str) -> dict[str, float]:
    """Serve the requests with `at_once` open at any time; return latencies in seconds, and output tokens a
    second."""
    waiting = list(enumerate(given))[::-1]
    seen: list[list[float]] = []

    async def client() -> None:
        while waiting:
            number, (prompt, count) = waiting.pop()
            seen.append(await times(llm, prompt, count, f"{name}-{number}"))

    await asyncio.gather(*(client() for _ in range(at_once)))
    latency = [one[-1] - one[0] for one in seen]
    span = max(one[-1] for one in seen) - min(one[0] for one in seen)
    return {
        "latency": float(np.mean(latency)),
        "p95": float(np.percentile(latency, 95)),
        "ttft": float(np.mean([one[1] - one[0] for one in seen])),
        "tokens_per_second": sum(len(one) - 1 for one in seen) / span,
    }


def accepted(llm: AsyncLLM) -> int:
    """Return the number of draft tokens accepted so far, by the workers' reports."""
    report = llm.report()
    return report.speculation.accepted if report and report.speculation else 0


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rounds and return their results, which are also written after each round."""
    figures: dict[str, Any] = {}
    rounds: list[dict[str, dict[str, float]]] = []
    async with AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(
                serving(args.model, **{"draft": "auto", "threads": 1, "num_blocks": 2000} | options)
            )
            for name, options in SYSTEMS.items()
        }
        # The first round is not counted: it touches memory for the first time.
        for seed in range(-1, args.rounds):
            given = requests(args.family, WARM if seed < 0 else args.requests, seed)
            measured = {}
            for name in random.Random(seed).sample(list(SYSTEMS), len(SYSTEMS)):
                measured[name] = await closed_loop(running[name], given, args.at_once, f"{seed}")
            if seed >= 0:
                rounds.append(measured)
                figures = results(rounds, running)
                write("streamserve_live", {**vars(args), "time": "live"}, figures, PACKAGED_PAIR)
                print(seed, {name: round(one["latency"], 3) for name, one in measured.items()}, flush=True)
    return figures


def results(rounds: list[dict[str, dict[str, float]]], running: dict[str, AsyncLLM]) -> dict[str, Any]:
    """Return for each system the medians over rounds and its ratios to the full system; the interaction; and
    the number of draft tokens accepted so far."""
    systems = {
        name: {key: float(np.median([one[name][key] for one in rounds])) for key in rounds[0][name]}
        | {
            f"{key}_ratio": interval([one[name][key] / one[FULL][key] for one in rounds], np.median)
            for key in ("latency", "tokens_per_second")
        }
        for name in SYSTEMS
    }
    speed = [{name: one[name]["tokens_per_second"] for name in SYSTEMS} for one in rounds]
    of_speculation = [
        (one[FULL] / one["w/o speculation"])
        / (one["w/o disaggregation"] / one["w/o disaggregation and speculation"])
        for one in speed
    ]
    return {
        "systems": systems,
        "interaction": interval(of_speculation, np.median),
        "rounds": rounds,
        "accepted": {name: accepted(llm) for name, llm in running.items()},
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--family", default="functions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="requests of a round")
    parser.add_argument("--at-once", type=int, default=8)
    args = parse(parser, rounds=1, requests=4, at_once=2)
    figures = asyncio.run(measure(args))
    rows = [
        [name, *(f"{one[key]:.3f}" for key in ("latency", "p95", "ttft")), f"{one['tokens_per_second']:.0f}",
         str(figures["accepted"][name])]
        for name, one in figures["systems"].items()
    ]  # fmt: skip
    table("live ablation", ["", "latency, s", "p95", "TTFT", "tokens/s", "accepted"], rows)
    print("interaction", figures["interaction"])


if __name__ == "__main__":
    main()
