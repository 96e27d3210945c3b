"""Fixed depths against SpecuStream, printed and mended, and goodput: StreamServe's table 9 over concurrency.

One engine and one set of weights, live; what benchmarks.speculation does, with these policies.

    python -m benchmarks.specustream --concurrency 1 8 32
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.report import write
from benchmarks.speculation import SHAPE, Bench, measure, show
from streamserve import embedded
from streamserve.execution.inflate import inflate

SETTINGS = (
    "off", "fixed:3", "fixed:5", "fixed:7", "specustream-printed", "specustream-equations", "specustream",
    "goodput",
)  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=["functions", "articles"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--requests", type=int, default=4, help="prompts a run, at least twice the streams")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", choices=("train", "heldout"), default="heldout", help="of the tasks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "target"
        inflate(embedded.path("embedded"), target, SHAPE)
        records = measure(Bench(target, "auto", args.settings), args)
    show(records, args.settings)
    write("specustream", vars(args), records)


if __name__ == "__main__":
    main()
