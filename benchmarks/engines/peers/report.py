"""The table, the JSON and the plot of all rounds of a model."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.engines.peers import quality
from benchmarks.engines.peers.adapters import OFFLINE_OF, OURS_OF, PEERS
from benchmarks.engines.peers.rounds import (
    Record,
    any_width,
    best_peer,
    failures,
    figures,
    read,
    width_of,
)
from benchmarks.engines.peers.scenarios import HTTP, SCENARIOS
from benchmarks.options import results_folder
from benchmarks.report import machine, table, write
from streamserve.execution.backends.native.library import kernels
from streamserve.execution.backends.native.paths import best_path, name_of

Scenarios = dict[str, dict[str, dict[str, Any]]]
"""Results by scenario and engine."""

TITLES = {name: scenario.title for name, scenario in SCENARIOS.items()} | {
    "http": HTTP.title,
    "ready": "time to ready",
    "ready-http": "time to ready, server",
    "memory-anonymous": "memory, anonymous",
    "memory-resident": "memory, resident",
}
NAMES = {name: peer.title for name, peer in PEERS.items()} | {
    name: f"{PEERS[OURS_OF[width]].title}, library" for width, name in OFFLINE_OF.items()
}
NOTES = (
    "*: the best peer",
    "ratio: the peer's time or memory over ours in the same round, median and 95 % interval: above 1 we lead",
    "floor: weights and KV read once a step at this round's bandwidth, or the FLOPs at its matrix rate",
    "OpenVINO keeps its KV cache in u8 unless told otherwise: shown, but the best peer has 16 bits or more",
    "llama.cpp runs through its batch interface here; its Python server answers one request after another",
)


def report(model: str, widths: Sequence[str], records: Path, write_results: bool) -> None:
    """Print the results of engines of these widths; `write_results` also writes the results of all widths as
    JSON and PNG, named after the model and the fastest instruction set of this processor."""
    if not records.exists():
        raise SystemExit(f"nothing was measured yet: there is no {records}")
    lines = read(records)
    scenarios = figures(lines)
    scenarios = {name: scenarios[name] for name in TITLES if name in scenarios}
    for width in widths:
        _print(f"{model}, {width}", of_width(scenarios, width))
    _print_any_width(any_width(lines, quality.no_worse))
    for failure in failures(lines):
        print(f"failed: {failure}")
    _print_agreement(lines)
    if write_results:
        name = f"peers-{model}-{_instructions()}"
        print(_write(name, model, lines, scenarios))
        for width in OURS_OF:
            timed = {
                key: of_width(scenarios, width)[key] for key in SCENARIOS if key in of_width(scenarios, width)
            }
            if timed:
                plot(f"{model}, {width}", timed, results_folder() / f"{name}-{width}.png")


def of_width(scenarios: Scenarios, width: str) -> Scenarios:
    """Return the results of the engines of this width in scenarios that at least one of them ran."""
    chosen = {
        scenario: {name: entry for name, entry in engines.items() if width_of(name) == width}
        for scenario, engines in scenarios.items()
    }
    return {scenario: engines for scenario, engines in chosen.items() if engines}


def _instructions() -> str:
    library = kernels()
    return name_of(best_path(library)) if library else "portable"


def _print_any_width(scenarios: dict[str, dict[str, Any]]) -> None:
    rows = [
        [TITLES[name], entry["ours"], entry["peer"], _ratio(entry), str(entry["rounds"])]
        for name, entry in scenarios.items()
    ]
    table(
        "the closest peer at any width, compared with our fastest that rounds no worse",
        ("scenario", "ours", "best peer", "ratio", "rounds"),
        rows,
    )


def _print(title: str, scenarios: Scenarios) -> None:
    rows = []
    for scenario, engines in scenarios.items():
        best = best_peer(engines)
        for name in (name for name in NAMES if name in engines):
            entry = engines[name]
            rows.append(
                [
                    TITLES[scenario] if name == next(n for n in NAMES if n in engines) else "",
                    NAMES[name] + (" *" if name == best else ""),
                    f"{entry['value']:.4g} {entry['unit']}",
                    f"{entry['share']:.0%}" if "share" in entry else "",
                    _ratio(entry),
                    str(entry["rounds"]),
                ]
            )
    columns = ("scenario", "engine", "median", "floor", "ratio to ours", "rounds")
    table(f"{title} on {machine()['processor']}", columns, rows)
    print("\n".join(NOTES))


def _ratio(entry: dict[str, Any]) -> str:
    if "ratio" not in entry:
        return ""
    low, high = entry["interval"]
    return f"{entry['ratio']:.2f} [{low:.2f}, {high:.2f}]"


def _print_agreement(lines: list[Record]) -> None:
    agree = [line["agree"] for line in lines if line.get("agree") is not None]
    if agree:
        print(f"first tokens agree between engines: {statistics.mean(agree):.1%}")


def _write(name: str, model: str, lines: list[Record], scenarios: Scenarios) -> Path:
    measured = [line for line in lines if "bandwidth" in line]
    settings = {
        "versions": {line["engine"]: line["version"] for line in lines if "version" in line},
        "precision": {line["engine"]: line["precision"] for line in lines if "precision" in line},
        "bandwidth GB/s": statistics.median(line["bandwidth"] for line in measured) / 1e9,
        "rate TFLOP/s": {
            width: statistics.median(rates) / 1e12
            for width in OURS_OF
            if (rates := [line["rate"] for line in measured if width_of(line["engine"]) == width])
        },
        "notes": NOTES,
    }
    best = {
        width: {name: best_peer(engines) for name, engines in of_width(scenarios, width).items()}
        for width in OURS_OF
    }
    figures = {
        "best peer": best.pop("bf16"),
        "best peer by width": best,
        "any width": any_width(lines, quality.no_worse),
        "scenarios": scenarios,
        "failed": failures(lines),
    }
    return write(name, settings, figures, [f"{model}, random weights"])


def plot(title: str, scenarios: Scenarios, path: Path) -> None:
    """Plot each scenario's share of the hardware floor, and the ratios to our engine with their intervals."""
    timed = [name for name in scenarios if any("share" in entry for entry in scenarios[name].values())]
    figure, (floors, ratios) = plt.subplots(1, 2, figsize=(13, 0.9 + 0.75 * len(timed)), sharey=True)
    engines = [name for name in NAMES if any(name in scenarios[scenario] for scenario in timed)]
    height = 0.8 / len(engines)
    for number, name in enumerate(engines):
        for row, scenario in enumerate(timed):
            entry = scenarios[scenario].get(name)
            if entry is None:
                continue
            y, colour = row + (number + 0.5) * height - 0.4, f"C{number}"
            label = NAMES[name] if scenario == next(s for s in timed if name in scenarios[s]) else None
            floors.barh(y, entry.get("share", 0), height * 0.9, color=colour, label=label)
            if "ratio" in entry and name not in OURS_OF.values():
                low, high = entry["interval"]
                error = [[entry["ratio"] - low], [high - entry["ratio"]]]
                ratios.errorbar(entry["ratio"], y, xerr=error, fmt="o", color=colour, markersize=4)
    floors.set_yticks(range(len(timed)), [TITLES[scenario] for scenario in timed])
    floors.invert_yaxis()
    floors.set(xlabel="share of the same round's floor", title=f"{title}, {machine()['processor']}")
    ratios.set(xlabel="their time / ours", xscale="log")
    ratios.axvline(1, color="grey", linewidth=0.8)
    floors.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
