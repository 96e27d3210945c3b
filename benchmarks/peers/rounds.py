"""Records of rounds, in a file that later runs extend, and their evaluation."""

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters import OURS

Record = dict[str, Any]
MACHINE = "machine"
NOT_BEST = ("openvino-u8", "offline")
"""Shown, but not compared with as the best peer: a coarser KV cache, and streamserve without HTTP."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """Return all records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(records: Iterable[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return for each scenario and engine: the median `value`, its `share` of the same round's floor, the
    `ratio` of its cost to ours in the same rounds with a 95 % `interval`, `rounds`, first tokens that
    `agree`."""
    grouped: dict[str, dict[str, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if "cost" in record:
            key = f"{record['slice']} {record['round']}"
            grouped[record["scenario"]][record["engine"]][key] = record
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for scenario, engines in grouped.items():
        ours = engines.get(OURS, {})
        measured[scenario] = {name: _engine(rounds, ours, name == OURS) for name, rounds in engines.items()}
    return measured


def _engine(rounds: Mapping[str, Record], ours: Mapping[str, Record], is_ours: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "value": statistics.median(record["value"] for record in rounds.values()),
        "unit": next(iter(rounds.values()))["unit"],
        "rounds": len(rounds),
    }
    shares = [record["floor"] / record["cost"] for record in rounds.values() if record.get("floor")]
    if shares:
        entry["share"] = statistics.median(shares)
    shared = sorted(rounds.keys() & ours.keys())
    if shared and not is_ours:
        ratios = [rounds[key]["cost"] / ours[key]["cost"] for key in shared]
        entry["ratio"], entry["interval"] = statistics.median(ratios), bootstrap(ratios)
        agree = [rounds[key]["agree"] for key in shared if rounds[key].get("agree") is not None]
        if agree:
            entry["agree"] = statistics.mean(agree)
    return entry


def bootstrap(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def best_peer(engines: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the peer with the lowest ratio of its cost to ours."""
    ratios = {name: entry["ratio"] for name, entry in engines.items() if "ratio" in entry}
    return min((name for name in ratios if name not in NOT_BEST), key=ratios.__getitem__, default=None)


def failures(records: Iterable[Record]) -> list[str]:
    """Return the errors, each once."""
    messages = (f"{r['engine']}, {r['scenario']}: {r['error']}" for r in records if "error" in r)
    return list(dict.fromkeys(messages))
