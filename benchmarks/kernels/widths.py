"""Matrix kernels of 8 and 4 bits compared with 16 bits, and with reading their weights once.

Every shape has enough copies of its weight that none is found in a cache. The widths are measured in the same
rounds, one after another; a result is the median over rounds, a ratio the median of ratios.

    python -m benchmarks.kernels.widths --threads 2 --rounds 7
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.kernels.kernels import MEMORY, SHAPES, ratio, reader, seconds
from benchmarks.options import parse, pick
from benchmarks.report import SIMULATED, table, write
from streamserve.execution.backends.native import library
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.paths import multiplier_rate, name_of
from streamserve.execution.formats.quantization import parse_format, quantize

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
WIDTHS = ("none", "int8", "int4", "int4:32")
Times = dict[str, list[float]]


def measure(
    pool: ThreadPool, shape: tuple[int, int], rows: Sequence[int], widths: Sequence[str], rounds: int
) -> dict[int, Times]:
    """Return seconds of a call by number of rows and width, and of reading all bytes of a width (`read
    WIDTH`)."""
    copies = max(2, pick(MEMORY, 0) // (2 * shape[0] * shape[1]))
    weights = [torch.randn(shape).to(torch.bfloat16) for _ in range(copies)]
    linears: dict[str, list[NativeLinear]] = {}
    for width in widths:
        format = parse_format(width)
        linears[width] = [
            NativeLinear(pool, quantize(weight, format) if format else weight) for weight in weights
        ]
    reads = {width: reader(pool, sum(linear.nbytes for linear in linears[width])) for width in widths}
    measured: dict[int, Times] = {count: {} for count in rows}
    for number in range(-1, rounds):
        for count in rows:
            x = torch.randn(count, shape[1]).to(torch.bfloat16)
            few = slice(0, copies if count <= 64 else max(2, copies // 8))
            for width in widths:
                call = seconds(linears[width][few], x)
                read = seconds([reads[width]]) / copies
                if number >= 0:
                    measured[count].setdefault(width, []).append(call)
                    measured[count].setdefault(f"read {width}", []).append(read)
    return measured


def figures(
    shape: tuple[int, int], rows: int, times: Times, widths: Sequence[str], peaks: Mapping[str, float]
) -> dict[str, Any]:
    """Return microseconds, speed against 16 bits and the shares of the memory bandwidth and of the
    multipliers' rate (operations a second, `peaks`), by width."""
    operations = 2 * rows * shape[0] * shape[1]
    return {"rows": rows} | {
        width: {
            "microseconds": 1e6 * statistics.median(times[width]),
            "speed": ratio(times["none"], times[width]),
            "share of bandwidth": ratio(times[f"read {width}"], times[width]),
            "share of multipliers": operations / statistics.median(times[width]) / peaks[width],
            "Top/s": operations / statistics.median(times[width]) / 1e12,
        }
        for width in widths
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--path", choices=[path.name for path in library.Path])
    args = parse(parser, threads=1, rounds=1, rows=[1], shapes=["345 M out"])
    built = kernels()
    if built is None:
        raise SystemExit("there are no kernels to measure: see the log")
    torch.set_num_threads(args.threads)
    pool = ThreadPool(built, args.threads, library.Path[args.path] if args.path else None)
    chosen = pool.path(torch.bfloat16)
    peaks = {width: multiplier_rate(pool, chosen, 16 if width == "none" else 8) for width in WIDTHS}
    results = {}
    for name in args.shapes:
        measured = measure(pool, SHAPES[name], args.rows, WIDTHS, args.rounds)
        results[name] = [
            figures(SHAPES[name], rows, times, WIDTHS, peaks) for rows, times in measured.items()
        ]
        lines = [
            [
                str(entry["rows"]),
                *(
                    f"{one['microseconds']:.0f} µs, {one['speed']:.2f}, {one['share of bandwidth']:.0%}, "
                    f"{one['share of multipliers']:.0%}"
                    for one in (entry[width] for width in WIDTHS)
                ),
            ]
            for entry in results[name]
        ]
        table(f"{name}: µs, speed to 16 bits, shares of bandwidth and multipliers", ["rows", *WIDTHS], lines)
    print(write(f"widths-{name_of(chosen)}", {**vars(args), "path": chosen.name}, results, SIMULATED))


if __name__ == "__main__":
    main()
