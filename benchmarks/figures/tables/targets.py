"""Latency targets: attainment and goodput by policy and service order, and SpecuStream."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.figures.files import figures, load
from benchmarks.figures.lookup import call

from .base import TABLES, Row, caption, interval, markdown, table

COLUMNS = {
    "attainment": lambda one: interval(one["attainment"], one["attainment_interval"], 0, 100, " %"),
    "goodput": lambda one: interval(one["goodput"], one["goodput_interval"]),
    "drafting": lambda one: f"{one['drafting']:.0%}".replace("%", " %"),
    "first token, ms": lambda one: f"{one['ttft'] * 1e3:.0f}",
    "tokens/s": lambda one: f"{one['throughput']:.1f}",
}


def _sweep(name: str, file: str, columns: Sequence[str]) -> None:
    """Register a table with one row for each policy, and these columns for each point of the sweep."""

    def render(up: str) -> str:
        settings, records = load(file)["settings"], figures(file)
        key = settings["sweep"]
        points = list(dict.fromkeys(record[key] for record in records))
        policies = list(dict.fromkeys(record["setting"] for record in records))
        head = ["", *(f"{point:g}: {column}" for point in points for column in columns)]
        by = {(record[key], record["setting"]): record for record in records}
        rows = [
            [f"`{policy}`", *(COLUMNS[column](by[point, policy]) for point in points for column in columns)]
            for policy in policies
        ]
        tpot, seeds, requests = (settings[key] for key in ("minimum_tpot_ms", "seeds", "requests"))
        made = (
            f"B = {settings['B']:g}, minimum TPOT {tpot:.1f} ms, {seeds} seeds of {requests} requests, "
            f"95 % intervals. Costs: {settings['costs']}. Virtual time."
        )
        return f"{made}\n\n{markdown(head, rows)}\n\n{caption([file], up)}"

    TABLES[name] = render


_sweep("targets/batching", "slo_rate_here_batching", ("attainment", "goodput"))
_sweep("targets/speculation", "slo_rate_here", ("attainment", "goodput", "drafting"))
_sweep("targets/others", "slo_rate_here_others", ("attainment", "goodput", "drafting"))
_sweep("targets/tpot-alone", "slo_rate_here_paced", ("attainment", "goodput", "first token, ms"))
_sweep("targets/share", "slo_share_here", ("attainment", "goodput"))
_sweep("targets/scale", "slo_scale_here", ("attainment",))
_sweep("targets/loose", "slo_loose_here", ("tokens/s",))
_sweep("targets/a100-batching", "slo_rate_a100_batching", ("attainment", "goodput"))
_sweep("targets/a100", "slo_rate_a100", ("attainment", "goodput", "drafting"))
_sweep("targets/h200", "slo_rate_h200", ("attainment", "goodput"))


def _compared(file: str) -> tuple[Row, list[Row]]:
    """Return live and simulated values for the same requests, and their ratio."""
    head = [
        "rate", "", "attainment", "goodput", "first token, ms", "TPOT, ms", "scheduling, drafting, target",
    ]  # fmt: skip
    rows = []
    for record in figures(file):
        real, virtual, ratio = record["live"], record["virtual"], record["ratio"]
        parts = [real[part] for part in ("scheduling", "drafting", "target")]
        rows.append(
            [
                f"{record['rate']:g}",
                f"`{record['setting']}`",
                f"{real['attainment'] * 100:.0f} / {virtual['attainment'] * 100:.0f} %",
                _both(real, virtual, ratio, "goodput", 1, 0),
                _both(real, virtual, ratio, "ttft", 1e3, 0),
                _both(real, virtual, ratio, "tpot", 1e3, 1),
                ", ".join(f"{part / sum(parts) * 100:.0f}" for part in parts) + " %",
            ]
        )
    return head, rows


table("targets/live", "slo_live")(lambda: _compared("slo_live"))
table("targets/live-adaserve", "slo_live_adaserve")(lambda: _compared("slo_live_adaserve"))


def _both(live: Any, virtual: Any, ratio: Any, key: str, factor: float, digits: int) -> str:
    pair = " / ".join(f"{one[key] * factor:.{digits}f}" for one in (live, virtual))
    return f"{pair}, {ratio[key]:.2f}"


def _rates(file: str) -> tuple[Row, list[Row]]:
    settings = load(file)["settings"]["settings"]
    head = ["family, streams", *(f"`{name}`" for name in settings)]
    rows = [
        [
            f"{record['family']}, {record['streams']}",
            *(f"{record['tokens_per_second'][name]:.0f}" for name in settings),
        ]
        for record in figures(file)
    ]
    return head, rows


@table("specustream/live", "specustream")
def specustream() -> tuple[Row, list[Row]]:
    """Return tokens a second by family and concurrency."""
    return _rates("specustream")


@table("specustream/virtual", "specustream_virtual")
def specustream_virtual() -> tuple[Row, list[Row]]:
    """Return tokens a second by family and concurrency, in virtual time."""
    return _rates("specustream_virtual")


RATIOS = (
    "slo_rate_here_batching",
    "slo_rate_here",
    "slo_rate_here_others",
    "slo_share_here",
    "slo_rate_a100_batching",
    "slo_rate_a100",
    "slo_rate_h200",
)
COSTS = {"here": "measured", "a100": "A100, simulated", "h200": "H200, simulated"}


@table("targets/ratios", *RATIOS)
def ratios() -> tuple[Row, list[Row]]:
    """Return attainment and goodput of the default policy divided by each other policy's values."""
    rows = []
    for file in RATIOS:
        settings, records = load(file)["settings"], figures(file)
        key = settings["sweep"]
        ours = {record[key]: record for record in records if record["setting"] == "goodput"}
        for policy in dict.fromkeys(record["setting"] for record in records):
            others = [record for record in records if record["setting"] == policy != "goodput"]
            if others:
                cells = [
                    ", ".join(f"{ours[one[key]][what] / one[what]:.2f}" for one in others)
                    for what in ("attainment", "goodput")
                ]
                points = ", ".join(f"{one[key]:g}" for one in others)
                label = f"share of strict requests, rate {settings['rate']:g}" if key == "share" else key
                rows.append([f"`{policy}`", COSTS[settings["hardware"]], f"{label} {points}", *cells])
    return ["goodput divided by", "costs", "at", "attainment", "goodput"], rows


def _live(part: str) -> list[float]:
    """Return how far live results differ from simulated ones, for every speculation policy at every rate."""
    return [
        abs(record["ratio"][part] - 1) for record in figures("slo_live") if record["setting"] != "chunked"
    ]


@call("targets.live.distance")
def _distance() -> float:
    return max(max(_live(part)) for part in ("goodput", "ttft", "tpot"))


@call("targets.live.attained")
def _attained() -> list[float]:
    return [one["live"]["attainment"] for one in figures("slo_live") if one["setting"] != "chunked"]


for _what in ("attainment", "goodput"):
    for _rate in (1.0, 2.0, 3.0):

        @call(f"targets.live.over_chunked.{_what}.{_rate:g}")
        def _over_chunked(what: str = _what, rate: float = _rate) -> float:
            ours, plain = (
                next(one for one in figures("slo_live") if (one["rate"], one["setting"]) == (rate, setting))
                for setting in ("goodput", "chunked")
            )
            return float(ours["live"][what] / plain["live"][what])


def _specustream(file: str, above: str, below: str) -> list[float]:
    return [one["tokens_per_second"][above] / one["tokens_per_second"][below] for one in figures(file)]


for _file in ("specustream", "specustream_virtual"):
    for _above, _below in (("specustream", "specustream-as-published"), ("goodput", "specustream")):
        call(f"{_file}.{_above}.over.{_below}")(
            lambda file=_file, above=_above, below=_below: _specustream(file, above, below)
        )
        call(f"{_file}.{_above}.over.{_below}.mean")(
            lambda file=_file, above=_above, below=_below: fmean(_specustream(file, above, below))
        )

    @call(f"{_file}.fixed_ahead")
    def _fixed_ahead(file: str = _file) -> int:
        return sum(
            max(rate for name, rate in one["tokens_per_second"].items() if name.startswith("fixed:"))
            > one["tokens_per_second"]["goodput"]
            for one in figures(file)
        )

    call(f"{_file}.lines")(lambda file=_file: len(figures(file)))


@call("targets.batching.gain")
def _batching_gain() -> float:
    records = {one["setting"]: one for one in figures("slo_rate_here_batching") if one["rate"] == 0.8}
    return float(records["goodput"]["attainment"] / records["chunked"]["attainment"])
