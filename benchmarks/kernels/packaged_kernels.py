"""Speed of a wheel's kernels compared with those compiled for this processor (`-march=native`).

Both libraries run the same calls in the same rounds, in alternating order: matrices of bf16, 8 and 4 bits for
several numbers of rows, and attention. A result is the median of the rounds' ratios (local time / packaged
time: 1 means equally fast) with its 95 % bootstrap interval; the last line is their geometric mean.

    make wheel && python -m benchmarks.kernels.packaged_kernels --threads 2 --rounds 9
"""

import argparse
import statistics
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.attention import HEADS, Step, prepare
from benchmarks.kernels.kernels import SHAPES, seconds
from benchmarks.options import parse, pick
from benchmarks.papers.pairs import interval
from benchmarks.report import SIMULATED, table, write
from streamserve.execution.backends.native.build import build
from streamserve.execution.backends.native.levels import LEVELS, detected_level
from streamserve.execution.backends.native.library import ThreadPool, load_library
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.packaged import file_name
from streamserve.execution.backends.native.paths import best_path, name_of
from streamserve.execution.formats.quantization import parse_format, quantize

ROWS = (1, 8, 32, 128, 510)
FORMATS = ("none", "int8", "int4")
STEPS = (Step(1, 512, 2048), Step(8, 1, 2048))
MEMORY = 200 << 20
"""Bytes of weights of one shape: more than this process's share of the CPU caches."""
SECONDS = 0.05
"""Minimum seconds of a library's measurement in each round."""

Case = tuple[str, list[Callable[[], Any]]]


def packaged(wheel: Path, level: str) -> Path:
    """Return the library of a level, extracted from the wheel to a temporary folder."""
    chosen = next(each for each in LEVELS if each.name == level)
    name = f"streamserve/execution/backends/native/compiled/{file_name(chosen)}"
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(name, tempfile.mkdtemp(prefix="streamserve-wheel-")))


def cases(pools: list[ThreadPool], shapes: list[str]) -> Iterator[Case]:
    """Yield names of cases, and for each thread pool the function to time."""
    for shape in shapes:
        for format in FORMATS:
            out, width = SHAPES[shape]
            copies = max(2, pick(MEMORY, 0) // (2 * out * width))
            weight = torch.randn(out, width).to(torch.bfloat16)
            chosen = parse_format(format)
            stored = quantize(weight, chosen) if chosen else weight
            linears = [[NativeLinear(pool, stored) for _ in range(copies)] for pool in pools]
            for rows in pick(ROWS, ROWS[:2]):
                x = torch.randn(rows, width).to(torch.bfloat16)
                yield f"{shape}, {format}, {rows} rows", [_all(each, x) for each in linears]
    for step in pick(STEPS, (Step(1, 1, 64),)):
        for quantized in (False, True):
            kind = "int8 KV" if quantized else "bf16 KV"
            yield (
                f"attention, {kind}, {step}",
                [prepare(pool, HEADS["1 B"], step, quantized) for pool in pools],
            )


def _all(linears: list[NativeLinear], x: torch.Tensor) -> Callable[[], None]:
    """Return a function that multiplies `x` with every copy of a weight."""

    def run() -> None:
        for linear in linears:
            linear(x)

    return run


def ratios(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return for each round the second call's time divided by the first call's. The order alternates between
    rounds."""
    repeats = max(1, round(pick(SECONDS, 0.0) / min(seconds([call]) for call in calls)))
    found = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {which: seconds([calls[which]] * repeats) for which in order}
        found.append(taken[1] / taken[0])
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to measure (default: the wheel in dist/)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["345 M gate, up", "1 B gate, up"])
    level = detected_level().name
    parser.add_argument("--level", choices=[each.name for each in LEVELS], default=level)
    args = parse(parser, threads=1, rounds=2, shapes=["345 M out"])
    wheel = args.wheel or next(Path("dist").glob("*manylinux*.whl"), None)
    if wheel is None:
        raise SystemExit("there is no wheel in dist/: make wheel")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    local = load_library(build())
    path = best_path(local)
    pools = [ThreadPool(load_library(packaged(wheel, args.level)), args.threads, path)]
    pools.append(ThreadPool(local, args.threads, pools[0].path(torch.bfloat16)))
    results = {}
    for name, calls in cases(pools, args.shapes):
        found = ratios(calls, args.rounds)
        results[name] = interval(found, np.median)
    total = statistics.geometric_mean(result["value"] for result in results.values())
    columns = ["value", "low", "high"]
    lines = [[name, *(f"{result[column]:.3f}" for column in columns)] for name, result in results.items()]
    lines.append(["all", f"{total:.3f}", "", ""])
    table("speed compared with -march=native", ["call", *columns], lines)
    chosen = name_of(pools[0].path(torch.bfloat16))
    settings = {**vars(args), "wheel": wheel.name, "path": chosen}
    print(write(f"packaged_kernels-{chosen}", settings, {"speed": total, "calls": results}, SIMULATED))


if __name__ == "__main__":
    main()
