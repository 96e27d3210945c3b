"""Throughput of streams with LoRA adapters, relative to the base model's alone.

Steps of one executor on an inflated model of 345 million parameters, in bfloat16: 16 decoding streams of the
base, the same streams with one of 20 adapters each, or all with the same adapter; and a prompt of 256 tokens.
The adapters are of several kinds. The cases alternate in rounds; the figures are medians of ratios within a
round, with bootstrap intervals.

    python -m benchmarks.overhead.lora
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.options import parse, pick
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import SamplingParams, embedded
from streamserve.contracts.plan import SequenceState, Span, StepPlan
from streamserve.contracts.tree import root
from streamserve.execution.formats.inflate import ModelShape, inflate
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.lora.weights import served_modules
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.adapters import CONFIG_FILE, WEIGHTS_FILE, open_adapter
from streamserve.protocol.config import ModelConfig

SHAPE = ModelShape(1024, 24)
ADAPTERS = 20
STREAMS = 16
CONTEXT = 64
PROMPT = 256
RESAMPLES = 2000


@dataclass(frozen=True)
class Kind:
    """Adapters of the linear modules whose names end with `modules`."""

    rank: int
    modules: tuple[str, ...] = ("_proj",)


KINDS = {
    "rank 8, q and v": Kind(8, ("q_proj", "v_proj")),
    "rank 8, all modules": Kind(8),
    "rank 16, all modules": Kind(16),
}
"""Kinds of adapters. The first has PEFT's default modules for this architecture."""

Case = Callable[[int], float]
"""A case takes the number of a round, runs that round, and returns its tokens per second."""


def write_adapter(folder: Path, spec: ModelSpec, kind: Kind, seed: int) -> Path:
    """Write a random adapter in PEFT's layout; return its folder."""
    rank = kind.rank
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (rows, columns) in served_modules(spec).items():
        if not module.endswith(kind.modules):
            continue
        name = f"base_model.model.{module}"
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = 0.1 * torch.randn(rows, rank, generator=generator) / rank**0.5
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def fingerprints(loaded: Loaded, folder: Path, kind: Kind) -> tuple[list[str], float]:
    """Load the adapters of a kind; return their fingerprints, and the median seconds to load an adapter."""
    assert loaded.adapters is not None
    found, seconds = [], []
    for number in range(pick(ADAPTERS, 2)):
        path = write_adapter(
            folder / f"{kind.rank}-{len(kind.modules)}-{number}", loaded.model.spec, kind, number
        )
        adapter = open_adapter(path.name, str(path))
        started = time.perf_counter()
        loaded.adapters.load(adapter.fingerprint, adapter.path)
        seconds.append(time.perf_counter() - started)
        found.append(adapter.fingerprint)
    return found, statistics.median(seconds)


def decoding(loaded: Loaded, adapters: Callable[[int], Sequence[str]], steps: int) -> Case:
    """Return the case in which `STREAMS` streams decode with the `adapters` of a round."""
    tables = [list(range(row * 8, row * 8 + 8)) for row in range(STREAMS)]

    def run(number: int) -> float:
        plan = StepPlan(
            1, [], [], [],
            [
                Span(row, CONTEXT - 1, [5], tables[row], tree=root(5), choices=(0,), adapter=adapter)
                for row, adapter in enumerate(adapters(number))
            ],
        )  # fmt: skip
        started = time.perf_counter()
        for _ in range(steps):
            loaded.executor.run(plan)
        return steps * STREAMS / (time.perf_counter() - started)

    return run


def prefilling(loaded: Loaded, adapter: str) -> Case:
    """Return the case in which a prompt is computed and no token is sampled."""
    blocks = list(range(STREAMS * 8, STREAMS * 8 + PROMPT // 16))
    plan = StepPlan(1, [], [], [], [Span(STREAMS, 0, [5] * PROMPT, blocks, adapter=adapter)])

    def run(number: int) -> float:
        started = time.perf_counter()
        loaded.executor.run(plan)
        return PROMPT / (time.perf_counter() - started)

    return run


def begin(loaded: Loaded) -> None:
    """Compute the context of all streams."""
    params = SamplingParams(temperature=0.0, seed=0)
    rows = range(STREAMS)
    states = [SequenceState(row, 0, params, [5] * CONTEXT, []) for row in (*rows, STREAMS)]
    spans = [Span(row, 0, [5] * CONTEXT, list(range(row * 8, row * 8 + 8))) for row in rows]
    loaded.executor.run(StepPlan(0, states, [], [], spans))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def measure(loaded: Loaded, adapters: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Return the rates of all cases in alternating rounds, relative to the base model's rate."""

    def of_round(number: int) -> list[str]:
        return [adapters[(number * 3 + row) % len(adapters)] for row in range(STREAMS)]

    cases = {
        "decode, base": decoding(loaded, lambda number: [""] * STREAMS, steps),
        "decode, an adapter each": decoding(loaded, of_round, steps),
        "decode, one adapter": decoding(loaded, lambda number: [adapters[0]] * STREAMS, steps),
        "prefill, base": prefilling(loaded, ""),
        "prefill, one adapter": prefilling(loaded, adapters[0]),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        order = list(cases) if number % 2 else list(cases)[::-1]
        for name in order:
            rate = cases[name](number)
            if number:  # the first round warms up
                rates[name].append(rate)
    result = {}
    for name, values in rates.items():
        base = rates[f"{name.partition(',')[0]}, base"]
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        low, high = interval(ratios)
        result[name] = {
            "tokens_per_second": statistics.median(values), "ratio": statistics.median(ratios),
            "low": low, "high": high,
        }  # fmt: skip
    return result


def of_kind(name: str, base: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Print and return the results of one kind of adapters."""
    kind = KINDS[name]
    config = ModelConfig(
        path=str(base), num_blocks=STREAMS * 8 + PROMPT // 16, max_model_len=1024, max_loras=ADAPTERS,
        max_lora_rank=kind.rank, draft="none",
    )  # fmt: skip
    loaded = load(config)
    adapters, seconds = fingerprints(loaded, base.parent, kind)
    begin(loaded)
    cases = measure(loaded, adapters, rounds, steps)
    assert loaded.adapters is not None
    rows = [
        [label, f"{case['tokens_per_second']:.1f}", f"{case['ratio']:.3f}",
         f"{case['low']:.3f} to {case['high']:.3f}"]
        for label, case in cases.items()
    ]  # fmt: skip
    table(name, ["case", "tokens/s", "ratio", "95 % interval"], rows)
    return {
        "bytes": loaded.adapters.nbytes, "load_seconds": seconds, "backend": loaded.model_info.backend,
        "cases": cases,
    }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--name", default="lora")
    arguments = parse(parser, rounds=1, steps=1)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        inflate(embedded.path("embedded"), base, pick(SHAPE, ModelShape(256, 8)))
        figures = {
            name: of_kind(name, base, arguments.rounds, arguments.steps)
            for name in pick(list(KINDS), list(KINDS)[:1])
        }
    settings = {
        "shape": "345 M", "adapters": ADAPTERS, "streams": STREAMS, "rounds": arguments.rounds,
        "steps": arguments.steps,
    }  # fmt: skip
    print(write(arguments.name, settings, figures, PACKAGED_PAIR[:1]))


if __name__ == "__main__":
    main()
