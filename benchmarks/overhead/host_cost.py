"""Host overhead of a decoding step: how its time is divided, by number of streams.

Plan selects the batch, allocates KV and builds the layout; forward is the model up to the logits; sampling
chooses tokens; commit advances the sequences and encodes the events. All streams are decoding, half of them
greedy, half with temperature, top_p and top_k. Medians over rounds, no speculation.

    python -m benchmarks.overhead.host_cost
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.options import parse, pick, results_folder
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import SamplingParams, embedded
from streamserve.engine.engine import Engine
from streamserve.execution.compute import executor as execution
from streamserve.execution.formats.inflate import ModelShape, inflate
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Events, Submit, encode

STREAMS = (1, 8, 32, 64)
SHAPES = {"embedded": None, "345 M": ModelShape(1024, 24)}
PHASES = ("plan", "forward", "sampling", "commit")
PROMPT = 64
KINDS = (
    SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50, seed=1, max_tokens=None, ignore_eos=True),
)


@contextmanager
def stopwatch(seconds: dict[str, float], places: dict[str, list[tuple[Any, str]]]) -> Iterator[None]:
    """Accumulate in `seconds` the time spent in methods, by phase; the methods are restored afterwards."""
    originals = []
    for phase, methods in places.items():
        for owner, name in methods:
            original = getattr(owner, name)
            originals.append((owner, name, original))
            setattr(owner, name, _timed(original, seconds, phase))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _timed(function: Callable[..., Any], seconds: dict[str, float], phase: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            seconds[phase] += time.perf_counter() - started

    return timed


def decoding(loaded: Loaded, streams: int) -> Engine:
    """Return an engine that is decoding `streams` texts."""
    engine = Engine(loaded.engine_config, loaded.model_info, loaded.executor, time.perf_counter)
    for number in range(streams):
        params = KINDS[number % 2]
        engine.handle(
            Submit(
                f"stream-{number}",
                [5 + number] * PROMPT,
                params,
                outputs={0: []},
                arrival=float(number),
            )
        )
    while any(sequence.pending > 1 for sequence in engine.scheduler.sequences.values()):
        engine.step()
    return engine


def measure(loaded: Loaded, streams: int, rounds: int, steps: int) -> dict[str, float]:
    """Return the microseconds of a step by phase, and the host's share of it."""
    engine = decoding(loaded, streams)
    places = {
        "plan": [
            (engine.scheduler, "plan"),
            (engine.scheduler, "select"),
            (execution, "lay_out"),
        ],
        "forward": [(loaded.model, "forward"), (loaded.model, "logits")],
        "sampling": [(execution.Sampler, "sample")],
    }
    measured = []
    for _ in range(rounds):
        seconds: dict[str, float] = defaultdict(float)
        with stopwatch(seconds, places):
            started = time.perf_counter()
            for _ in range(steps):
                encode(Events(engine.step()))
            total = time.perf_counter() - started
        seconds["commit"] = total - sum(seconds.values())
        measured.append({phase: 1e6 * seconds[phase] / steps for phase in PHASES})
    median = {phase: statistics.median(one[phase] for one in measured) for phase in PHASES}
    host = statistics.median(1 - one["forward"] / sum(one.values()) for one in measured)
    return {"streams": streams, **median, "host share": host}


def plot(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Plot the shares of a step as stacked bars by number of streams, one panel for each model."""
    figure, axes = plt.subplots(1, len(results), figsize=(5.5 * len(results), 4), sharey=True, squeeze=False)
    for axis, (name, entries) in zip(axes[0], results.items(), strict=True):
        labels = [str(entry["streams"]) for entry in entries]
        below = [0.0] * len(entries)
        for phase in PHASES:
            shares = [100 * entry[phase] / sum(entry[one] for one in PHASES) for entry in entries]
            axis.bar(labels, shares, bottom=below, label=phase)
            below = [a + b for a, b in zip(below, shares, strict=True)]
        axis.set(title=name, xlabel="streams", ylabel="% of a step")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=0, help="kernel threads; 0: one for each processor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="number of steps in a round")
    parser.add_argument("--model", choices=SHAPES, action="append", help="measure only this model")
    args = parse(parser, threads=1, rounds=1, steps=1, model=["embedded"])
    results = {}
    for name in args.model or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            path, shape = embedded.path("embedded"), SHAPES[name]
            if shape:
                inflate(path, Path(folder) / "inflated", shape)
                path = Path(folder) / "inflated"
            config = ModelConfig(
                path=str(path), threads=args.threads, max_model_len=1024, num_blocks=1024, draft="none"
            )
            loaded = load(config)
        results[name] = [
            measure(loaded, streams, args.rounds, args.steps) for streams in pick(STREAMS, STREAMS[:2])
        ]
        columns = ["streams", *(f"{phase}, µs" for phase in PHASES), "host"]
        rows = [
            [str(e["streams"]), *(f"{e[phase]:.0f}" for phase in PHASES), f"{100 * e['host share']:.1f} %"]
            for e in results[name]
        ]
        table(f"A decoding step of {name}", columns, rows)
    print(write("host_cost", vars(args), results, PACKAGED_PAIR))
    plot(results, results_folder() / "host_cost.png")


if __name__ == "__main__":
    main()
