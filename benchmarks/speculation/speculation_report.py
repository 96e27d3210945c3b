"""Report the pieces of benchmarks/speculation/speculation.py: tables, JSON, plots."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import results_folder
from benchmarks.report import PACKAGED_PAIR, machine, table, write

Record = dict[str, Any]


def report(cached: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Print all stored pieces in the folder `cached`, and write them to the results of this name."""
    grid = _rounds([json.loads(path.read_bytes()) for path in sorted(cached.glob("grid-*.json"))])
    path = cached / "acceptance.json"
    accepted: list[Record] = json.loads(path.read_bytes()) if path.exists() else []
    names = sorted({name for record in grid for name in record["ratio"]}, key=_order)
    _show(grid, names)
    _show_acceptance(accepted)
    write(name, settings, {"grid": grid, "acceptance": accepted}, PACKAGED_PAIR)
    if grid:
        _plot(grid, names, results_folder() / f"{name}.png")
    if accepted:
        _plot_calibration(accepted, results_folder() / f"{name}_calibration.png")


def _rounds(records: Sequence[Record]) -> list[Record]:
    """Return one record for each point of the grid: medians over its rounds."""
    points: dict[tuple[float, int, str], list[Record]] = defaultdict(list)
    for record in records:
        points[record["temperature"], record["streams"], record["family"]].append(record)
    merged = []
    for (temperature, streams, family), measured in sorted(points.items()):
        names = set.intersection(*(set(one["settings"]) for one in measured))
        figures = {
            name: {
                key: float(np.median([one["settings"][name][key] for one in measured]))
                for key in measured[0]["settings"][name]
                if key != "by_turn"
            }
            for name in sorted(names, key=_order)
        }
        ratio = {
            name: float(np.median(np.concatenate([_ratios(one, name) for one in measured])))
            for name in figures
        }
        merged.append(
            {
                "family": family, "temperature": temperature, "streams": streams, "rounds": len(measured),
                "commits": sorted({one["commit"] for one in measured}),
                "budget": float(np.median([one["budget"] for one in measured])),
                "ratio": ratio, "figures": figures,
                "texts_compared": sum(one["texts_compared"] for one in measured),
                "texts_that_differ": sum(one["texts_that_differ"] for one in measured),
            }
        )  # fmt: skip
    return merged


def _ratios(record: Record, setting: str) -> np.ndarray:
    """Return tokens a second relative to plain decoding in the same turn. Some settings have fewer turns."""
    rates, plain = (np.array(record["settings"][name]["by_turn"]) for name in (setting, "off"))
    return rates / plain[: len(rates)]


def _order(name: str) -> tuple[bool, bool, str]:
    return name != "off", name != "goodput", name


def _mean(group: Sequence[Record], setting: str) -> float | None:
    """Return the geometric mean over the families; None if a family is missing."""
    if not all(setting in record["ratio"] for record in group):
        return None
    return float(np.exp(np.mean([np.log(record["ratio"][setting]) for record in group])))


def _groups(grid: Sequence[Record]) -> dict[tuple[float, int], list[Record]]:
    groups: dict[tuple[float, int], list[Record]] = defaultdict(list)
    for record in grid:
        groups[record["temperature"], record["streams"]].append(record)
    return dict(sorted(groups.items()))


def _show(grid: Sequence[Record], names: Sequence[str]) -> None:
    """Print speeds relative to plain decoding, goodput's share of the best fixed setting, and policy time."""
    rows = []
    for record in grid:
        cells = [f"{record['ratio'][name]:.2f}" if name in record["ratio"] else "" for name in names]
        rows.append(
            [f"{record['family']} T={record['temperature']:g}", str(record["streams"]),
             f"{record['figures']['off']['tokens_per_second']:.0f}", *cells, "", "",
             f"{record['texts_that_differ']}/{record['texts_compared']}"]
        )  # fmt: skip
    for (temperature, streams), group in _groups(grid).items():
        means = {name: _mean(group, name) for name in names}
        fixed = [mean for name, mean in means.items() if mean and name.startswith("fixed")]
        share = f"{(means.get('goodput') or 0) / max(*fixed, 1.0):.2f}" if fixed else ""
        spent = [one["figures"]["goodput"]["scheduling_share"] for one in group if "goodput" in means]
        deciding = f"{np.mean(spent):.1%}" if spent else ""
        cells = [f"{mean:.2f}" if mean else "" for mean in means.values()]
        rows.append([f"mean T={temperature:g}", str(streams), "", *cells, share, deciding, ""])
    budgets = sorted({record["budget"] for record in grid})
    table(
        f"Tokens a second, as a multiple of plain decoding. {machine()['processor']}, B = {budgets} tokens",
        ["family", "streams", "plain tok/s", *names, "of best fixed", "deciding", "texts differ"],
        rows,
    )


def _show_acceptance(accepted: Sequence[Record]) -> None:
    keys = sorted({(one["setting"], one["temperature"], one["family"]) for one in accepted})
    rows = []
    for setting, temperature, family in keys:
        by_mode = {
            one["mode"]: one["accepted_per_tree"]
            for one in accepted
            if (one["setting"], one["temperature"], one["family"]) == (setting, temperature, family)
        }
        rows.append(
            [f"{family} {setting}", f"{temperature:g}",
             *(f"{by_mode[mode]:.2f}" if mode in by_mode else "" for mode in ("coupled", "rejection"))]
        )  # fmt: skip
    table("Draft tokens accepted of a tree", ["family", "T", "coupled", "rejection"], rows)


def _figure(panels: int) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(6 * panels, 4), squeeze=False)


def _plot(grid: Sequence[Record], names: Sequence[str], path: Path) -> None:
    """Plot the geometric mean over the families against the number of streams, a panel a temperature."""
    groups = _groups(grid)
    temperatures = sorted({temperature for temperature, _ in groups})
    figure, panels = _figure(len(temperatures))
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        for name in names:
            means = [
                (streams, _mean(group, name)) for (t, streams), group in groups.items() if t == temperature
            ]
            points = [(streams, mean) for streams, mean in means if mean]
            panel.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", markersize=3,
                       label=name, linewidth=3 if name == "goodput" else 1)  # fmt: skip
        panel.set(
            xscale="log", xlabel="streams", ylabel="multiple of plain decoding", title=f"T={temperature:g}"
        )
        panel.axhline(1.0, color="grey", linewidth=0.5)
    panels[0][-1].legend(fontsize=7)
    figure.suptitle(f"{machine()['processor']}, {machine()['cores']} cores", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _plot_calibration(accepted: Sequence[Record], path: Path) -> None:
    """Plot measured against predicted acceptance of draft tokens, by mode, greedy and sampled."""
    figure, panels = _figure(2)
    for panel, mode in zip(panels[0], ("coupled", "rejection"), strict=True):
        for temperature in sorted({one["temperature"] for one in accepted}):
            cached = [
                np.array(one["calibration"])
                for one in accepted
                if (one["mode"], one["temperature"]) == (mode, temperature)
            ]
            bins = np.sum(cached, axis=0)
            bins = bins[bins[:, 2] > 0]
            panel.plot(
                bins[:, 0] / bins[:, 2], bins[:, 1] / bins[:, 2], marker="o", label=f"T={temperature:g}"
            )
        panel.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
        panel.set(xlabel="predicted", ylabel="accepted", title=mode)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
