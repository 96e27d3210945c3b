"""Our matrix kernel compared with memory bandwidth, with its own speed at one row, and with oneDNN.

oneDNN gets packed weights in bf16, where packing makes it faster. Results are stored by instruction set and
type, so that results of several processors can be compared.

Every shape has enough copies of its weight that none is found in a cache. All compared values are measured
in the same rounds, one after another; a result is the median over rounds, a ratio the median of ratios.

    python -m benchmarks.kernels.kernels --threads 2 --rounds 9 --dtype float32
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

from benchmarks.options import parse, pick
from benchmarks.report import SIMULATED, table, write
from streamserve.execution.backends.native import library
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.model.linear import Linear

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 510)
SHAPES = {
    "345 M qkv": (1600, 960),
    "345 M out": (960, 960),
    "345 M gate, up": (5120, 960),
    "345 M down": (960, 2560),
    "1 B qkv": (3072, 2048),
    "1 B out": (2048, 2048),
    "1 B gate, up": (16384, 2048),
    "1 B down": (2048, 8192),
}
MEMORY = 200 << 20
"""Bytes of weights of one shape: more than this process's share of the CPU caches."""


@dataclass
class Series:
    """Seconds of one call in each round, for one shape and number of rows."""

    ours: list[float] = field(default_factory=list)
    onednn: list[float] = field(default_factory=list)
    one_row: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


def seconds(calls: Sequence[Callable[..., Any]], *arguments: Any) -> float:
    """Return the seconds of one call, as the mean over all calls."""
    time.sleep(0.005)  # OpenMP's threads keep spinning for a while after the previous measurement
    start = time.perf_counter()
    for call in calls:
        call(*arguments)
    return (time.perf_counter() - start) / len(calls)


def reader(pool: ThreadPool, size: int) -> Callable[[], None]:
    """Return a function that reads `size` bytes with the thread pool, at memory bandwidth."""
    memory = pool.memory(size)
    memory.fill_(1)
    return lambda: pool.library.ss_read(pool.handle, ctypes.c_void_p(memory.data_ptr()), size // 8)


def measure(
    pool: ThreadPool, shape: tuple[int, int], rows: Sequence[int], rounds: int, dtype: torch.dtype
) -> dict[int, Series]:
    """Measure all numbers of rows of one shape, in interleaved rounds."""
    size = dtype.itemsize * shape[0] * shape[1]
    copies = max(2, pick(MEMORY, 0) // size)
    weights = [torch.randn(shape).to(dtype) for _ in range(copies)]
    ours = [NativeLinear(pool, weight) for weight in weights]
    onednn = [Linear(weight) for weight in weights]
    read = reader(pool, copies * size)
    measured = {count: Series() for count in rows}
    inputs = {count: torch.randn(count, shape[1]).to(dtype) for count in (1, *rows)}
    for round_number in range(-1, rounds):
        for count in rows:
            x = inputs[count]
            few = slice(0, copies if count <= 64 else max(2, copies // 8))
            part = Series(
                [seconds(ours[few], x)],
                [seconds(onednn[few], x)],
                [seconds(ours, inputs[1])],
                [seconds([read]) / copies],
            )
            if round_number >= 0:
                for name in ("ours", "onednn", "one_row", "read"):
                    getattr(measured[count], name).extend(getattr(part, name))
    return measured


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def figures(shape: tuple[int, int], rows: int, series: Series, dtype: torch.dtype) -> dict[str, float]:
    """Return the reported values of one shape and number of rows."""
    call = statistics.median(series.ours)
    return {
        "rows": rows,
        "microseconds": call * 1e6,
        "GB/s": dtype.itemsize * shape[0] * shape[1] / call / 1e9,
        "TFLOP/s": 2 * rows * shape[0] * shape[1] / call / 1e12,
        "times one row": ratio(series.ours, series.one_row),
        "speed to oneDNN": ratio(series.onednn, series.ours),
        "share of bandwidth": ratio(series.read, series.ours),
    }


def plot(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Plot cost in units of reading the weights once, and speed relative to oneDNN, over rows."""
    figure, (cost, speed) = plt.subplots(1, 2, figsize=(12, 4.5))
    for name, entries in results.items():
        rows = [entry["rows"] for entry in entries]
        cost.plot(rows, [1 / entry["share of bandwidth"] for entry in entries], marker=".", label=name)
        speed.plot(rows, [entry["speed to oneDNN"] for entry in entries], marker=".", label=name)
    cost.set(xscale="log", yscale="log", xlabel="rows", ylabel="time / time to read the weights once")
    speed.set(xscale="log", xlabel="rows", ylabel="speed / oneDNN's")
    speed.axhline(1, color="grey", linewidth=0.8)
    cost.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--path", choices=[path.name for path in library.Path])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parse(parser, threads=1, rounds=1, rows=[1], shapes=["345 M out"])
    built = kernels()
    if built is None:
        raise SystemExit("there are no kernels to measure: see the log")
    torch.set_num_threads(args.threads)
    pool = ThreadPool(built, args.threads, library.Path[args.path] if args.path else None)
    dtype: torch.dtype = getattr(torch, args.dtype)
    results: dict[str, list[dict[str, float]]] = {}
    for name in args.shapes:
        measured = measure(pool, SHAPES[name], args.rows, args.rounds, dtype)
        results[name] = [figures(SHAPES[name], count, series, dtype) for count, series in measured.items()]
        columns = list(results[name][0])
        lines = [[f"{entry[column]:.3g}" for column in columns] for entry in results[name]]
        table(f"{name}: {SHAPES[name][1]} to {SHAPES[name][0]}", columns, lines)
    settings = {**vars(args), "path": pool.path(dtype).name}
    path = write(f"kernels-{settings['path'].lower()}-{args.dtype}", settings, results, SIMULATED)
    plot(results, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
