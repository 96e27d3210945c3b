"""Workers on other machines: recovery from faults, KV over TCP, the head's load."""

from statistics import median
from typing import Any

from benchmarks.figures.files import figures

from .base import Row, table


@table("cluster/faults", "machine_faults")
def faults() -> tuple[Row, list[Row]]:
    """Return recovery times by fault."""
    trials: list[dict[str, Any]] = figures("machine_faults")["trials"]
    rows = []
    for fault in dict.fromkeys(trial["fault"] for trial in trials):
        those = [trial for trial in trials if trial["fault"] == fault]
        seconds = [trial["seconds"] for trial in those if trial["verdict"] == "passed"]
        rows.append([
            fault,
            str(len({trial["event"] for trial in those})),
            str(len(those)),
            str(len(those) - len(seconds)),
            f"{min(seconds):.1f}",
            f"{median(seconds):.1f}",
            f"{max(seconds):.1f}",
        ])  # fmt: skip
    return ["fault", "events", "trials", "failed", "shortest, s", "median, s", "longest, s"], rows


@table("cluster/transfer", "pair_hosts")
def transfer() -> tuple[Row, list[Row]]:
    """Return prefill time and exposed transfer time, per prompt."""
    rows = []
    for name, one in figures("pair_hosts").items():
        each, link = one["prompts"], one.get("link_bytes_per_second")
        rows.append([
            name,
            f"{8 * link / 1e9:.2f} Gbit/s" if link else "–",
            f"{one['bytes'] / each / 1e6:.2f} MB",
            f"{1e3 * one['prefill_seconds'] / each:.0f} ms",
            f"{1e3 * one['exposed_seconds'] / each:.1f} ms",
            f"{100 * one['exposed_share']:.1f} %",
        ])  # fmt: skip
    return ["transport", "plain TCP there", "KV", "prefill", "exposed", "share"], rows


@table("cluster/load", "cluster_load")
def load() -> tuple[Row, list[Row]]:
    """Return the head's share of a processor by tokens a second."""
    measured: list[dict[str, float]] = figures("cluster_load")
    idle = next(one["cpu_share"] for one in measured if not one["rate"])
    rows = []
    for one in measured:
        thousands = one["tokens_per_second"] / 1000
        each = f"{100 * (one['cpu_share'] - idle) / thousands:.1f} %" if thousands else "–"
        rows.append([f"{one['tokens_per_second']:,.0f}", f"{100 * one['cpu_share']:.1f} %", each])
    return ["tokens/s", "of a processor", "for each 1,000 tokens/s, beyond that without tokens"], rows
