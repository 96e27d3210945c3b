"""Fixed depths, SpecuStream as published and corrected, and goodput: StreamServe's table 9 over concurrency.

Live, as speculation/speculation.py measures: one engine, a closed loop of streams, settings in alternation.

    python -m benchmarks.papers.specustream --streams 1 8 32
"""

import argparse
import random
from collections import defaultdict
from typing import Any

from benchmarks.options import parse
from benchmarks.report import PACKAGED_PAIR, table, write
from benchmarks.speculation.speculation import PROMPTS, Bench, Window, budget, prompts, target

SETTINGS = (
    "off", "fixed:3", "fixed:5", "fixed:7", "specustream-as-published", "specustream-equations",
    "specustream", "goodput",
)  # fmt: skip


def measure(bench: Bench, family: str, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a second of each setting, in total and by turn. Only values of the same turn are
    compared."""
    requests = prompts(family, args.split, args.seed)
    bench.run("off", requests, 0.0, min(streams, PROMPTS), 0.0)  # computes the prompts into the cache
    windows: dict[str, list[Window]] = defaultdict(list)
    for turn in range(-1, args.turns):  # not counted: in the first turn the policies only adapt
        order = [name for name in args.settings if turn >= 0 or not name.startswith(("fixed", "off"))]
        random.Random(f"{family}-{streams}-{turn}").shuffle(order)
        for setting in order:
            window = bench.run(setting, requests, 0.0, streams, args.window)
            if turn >= 0:
                windows[setting].append(window)
    return {
        "family": family,
        "streams": streams,
        "tokens_per_second": {
            name: sum(one.tokens for one in measured) / sum(one.seconds for one in measured)
            for name, measured in windows.items()
        },
        "by_turn": {
            name: [one.tokens / one.seconds for one in measured] for name, measured in windows.items()
        },
        "tokens_per_step": {
            name: sum(one.tokens for one in measured) / sum(one.steps for one in measured)
            for name, measured in windows.items()
        },
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=["functions", "articles"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument(
        "--window", type=float, default=1.5, help="seconds for which a setting runs in each turn"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--split", choices=("train", "heldout"), default="heldout", help="which wordings of the tasks"
    )
    parser.add_argument("--name", default="specustream", help="name of the result file")
    args = parse(
        parser, families=["functions"], streams=[1], settings=["off", "specustream"], window=0.05, turns=1
    )
    bench = Bench(target())
    records: list[dict[str, Any]] = []
    for streams in args.streams:
        for family in args.families:
            records.append(measure(bench, family, streams, args))
            write(args.name, {**vars(args), "B": budget(bench)}, records, PACKAGED_PAIR)
    rows = [
        [f"{record['family']}, {record['streams']}"]
        + [f"{record['tokens_per_second'][setting]:.0f}" for setting in args.settings]
        for record in records
    ]
    table(f"tokens a second; B = {budget(bench):g}", ["family, streams", *args.settings], rows)


if __name__ == "__main__":
    main()
