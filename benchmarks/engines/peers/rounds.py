"""Records of rounds, in a file that later runs extend, and their evaluation."""

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.peers.adapters import ALL_OURS, OFFLINE_OF, OURS, OURS_OF, PEERS

Record = dict[str, Any]
MACHINE = "machine"
NOT_BEST = ("openvino-u8", *OFFLINE_OF.values(), *ALL_OURS)
"""Engines that are shown but never counted as the best peer: those with a coarser KV cache, and streamserve
itself."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """Return all records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def figures(records: Iterable[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by scenario and engine: the median `value`, its `share` of the same round's hardware floor, the
    `ratio` of its cost to our engine's in the same rounds with a 95 % `interval`, the number of `rounds`, and
    the share of first tokens that `agree`."""
    grouped: dict[str, dict[str, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if "cost" in record:
            key = f"{record['slice']} {record['round']}"
            grouped[record["scenario"]][record["engine"]][key] = record
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for scenario, engines in grouped.items():
        measured[scenario] = {
            name: _engine(rounds, engines.get(OURS_OF[width_of(name)], {}), name in OURS_OF.values())
            for name, rounds in engines.items()
        }
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


def any_width(records: Iterable[Record], comparable: Callable[[str, str], bool]) -> dict[str, dict[str, Any]]:
    """Return for each scenario the peer that comes closest to ours at any width, and by how much.

    A peer is compared with the fastest of our engines that is `comparable(ours, peer)`: an engine is
    comparable if its rounding diverges no more from float32. `ratio` is the median of its cost divided by
    ours in the rounds in which both ran.
    """
    costs: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if record.get("unit") == "tokens/s" and record["engine"] not in {*NOT_BEST} - {*ALL_OURS}:
            key = f"{record['slice']} {record['round']}"
            costs[record["scenario"]][record["engine"]][key] = record["cost"]
    closest = {}
    for scenario, engines in costs.items():
        entries = [
            entry
            for peer in engines
            if peer not in ALL_OURS and (entry := _at_its_width(engines, peer, comparable))
        ]
        if entries:
            closest[scenario] = min(entries, key=lambda entry: entry["ratio"])
    return closest


def _at_its_width(
    engines: Mapping[str, Mapping[str, float]], peer: str, comparable: Callable[[str, str], bool]
) -> dict[str, Any] | None:
    best: dict[str, Any] | None = None
    for ours in ALL_OURS:
        shared = sorted(engines.get(ours, {}).keys() & engines[peer].keys())
        if not shared or not comparable(ours, peer):
            continue
        ratios = [engines[peer][key] / engines[ours][key] for key in shared]
        ratio, interval = statistics.median(ratios), bootstrap(ratios)
        if best is None or ratio > best["ratio"]:
            best = {"ours": ours, "peer": peer, "ratio": ratio, "interval": interval, "rounds": len(ratios)}
    return best


def width_of(name: str) -> str:
    """Return the width of an engine's weights."""
    for width, offline in OFFLINE_OF.items():
        if name == offline:
            return width
    return PEERS.get(name, PEERS[OURS]).width


def best_peer(engines: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the peer with the lowest ratio of its cost to our engine's; all peers have weights of the same
    width."""
    ratios = {name: entry["ratio"] for name, entry in engines.items() if "ratio" in entry}
    return min((name for name in ratios if name not in NOT_BEST), key=ratios.__getitem__, default=None)


def failures(records: Iterable[Record]) -> list[str]:
    """Return the distinct errors."""
    messages = (f"{r['engine']}, {r['scenario']}: {r['error']}" for r in records if "error" in r)
    return list(dict.fromkeys(messages))
