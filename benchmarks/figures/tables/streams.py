"""Prompt streams: time to first token by service order and eviction."""

from typing import Any

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, interval, table

PERCENTILES = ("p50", "p95", "p99")
MAIN = {
    "append 0.8": "streaming-append",
    "update 0.8": "streaming-update",
    "append ×10": "streaming-append-pressure",
    "update ×30": "streaming-update-pressure",
}
POLICIES = ("no streaming", "slo, no streaming", "naive", "slo cost", "slo, memory for all", "slo, alone")


def _ratios(plain: Any, one: Any) -> list[float]:
    return [plain[key] / one[key] for key in PERCENTILES]


@table("streams/main", *MAIN.values())
def main() -> tuple[Row, list[Row]]:
    """Return seconds to the first token, their ratio to the result without streaming, and the change of
    completion time."""
    rows = []
    for part, file in MAIN.items():
        found = figures(file)[part]
        plain = found["no streaming"]
        for policy in (name for name in POLICIES if name in found):
            one = found[policy]
            change = f"{(one['completion'] / plain['completion'] - 1) * 100:+.1f} %"
            rows.append(
                [
                    part,
                    policy,
                    *(f"{one[key]:.2f}" for key in PERCENTILES),
                    *(f"{ratio:.2f}" for ratio in _ratios(plain, one)),
                    "" if policy == "slo, alone" else change,
                ]
            )
    return ["", "policy", *PERCENTILES, *(f"{key} ×" for key in PERCENTILES), "completion"], rows


@table("streams/orders", "streaming-append", "streaming-update")
def orders() -> tuple[Row, list[Row]]:
    """Return the speed-up of each order over no streaming, with enough memory for all prompts."""
    names = ("slo", "fcfs", "lcas", "mcps", "arrival")
    rows = []
    for file in ("streaming-append", "streaming-update"):
        for part, found in figures(file).items():
            cells = [
                ", ".join(f"{ratio:.1f}" for ratio in _ratios(found["no streaming"], found[f"{name} cost"]))
                for name in names
            ]
            rows.append([part, *cells])
    return ["p50, p95, p99, times better than no streaming", *names], rows


def _evictions(*files: str) -> tuple[Row, list[Row]]:
    """Return mean and p99 of each eviction policy, and what `cost` decides."""
    names = ("recompute", "swap", "cost")
    rows = [
        [
            part,
            *(f"{found[name]['mean']:.3f}, {found[name]['p99']:.2f}" for name in names),
            f"{found['cost']['recomputes']}, {found['cost']['swaps']}",
        ]
        for file in files
        for part, found in figures(file).items()
    ]
    return ["mean and p99, s", *names, "`cost`: recomputed, swapped"], rows


@table("streams/eviction", "streaming-append-profiles", "streaming-update-profiles")
def eviction() -> tuple[Row, list[Row]]:
    """Return the eviction policies on four kinds of hardware."""
    return _evictions("streaming-append-profiles", "streaming-update-profiles")


@table("streams/eviction/tight", "streaming-update-tight")
def eviction_of_updates() -> tuple[Row, list[Row]]:
    """Return the eviction policies for replaced prompts that do not fit into memory."""
    return _evictions("streaming-update-tight")


@table("streams/eviction/live", "streaming-live-evictions")
def evictions_live() -> tuple[Row, list[Row]]:
    """Return what a server evicted, and the seconds that it expected the evictions to cost."""
    rows = [
        [
            part,
            f"{1000 * found['p50']:.0f}, {1000 * found['p99']:.0f}",
            f"{found['recomputes']:.0f}, {found['swaps']:.0f}",
            f"{1000 * found['recompute_predicted']:.1f}, {1000 * found['swap_predicted']:.1f}",
        ]
        for part, found in figures("streaming-live-evictions").items()
    ]
    head = ["", "p50 and p99, ms", "`cost`: recomputed, swapped", "expected to cost, ms"]
    return head, rows


@table("streams/order", *MAIN.values())
def order_alone() -> tuple[Row, list[Row]]:
    """Return the gain of the service order without streaming, and the gain of streaming in that order."""
    rows = []
    for part, file in MAIN.items():
        names = ("no streaming", "slo, no streaming", "slo cost")
        plain, ordered, streamed = (figures(file)[part][name] for name in names)
        gains = (_ratios(plain, ordered), _ratios(ordered, streamed), _ratios(plain, streamed))
        rows.append([part, *(", ".join(f"{ratio:.1f}" for ratio in gain) for gain in gains)])
    return ["p50, p95, p99, times better", "order alone", "streaming alone", "both"], rows


@table("streams/live", "streaming-live-append", "streaming-live-update")
def live() -> tuple[Row, list[Row]]:
    """Return the times to first token over HTTP, with the largest value, as there are few queries."""
    rows = []
    for kind in ("append", "update"):
        found = figures(f"streaming-live-{kind}")[f"live {kind} 0.8"]
        plain = found["no streaming"]
        for policy, one in found.items():
            rows.append(
                [
                    kind,
                    {"arrival": "naive"}.get(policy, policy),
                    *(f"{one[key]:.2f}" for key in PERCENTILES),
                    f"{max(one['tail']):.2f}",
                    *(f"{ratio:.2f}" for ratio in _ratios(plain, one)),
                    f"{max(plain['tail']) / max(one['tail']):.2f}",
                    f"{(one['completion'] / plain['completion'] - 1) * 100:+.1f} %",
                ]
            )
    head = ["", "", *PERCENTILES, "largest", *(f"{key} ×" for key in PERCENTILES), "largest ×", "completion"]
    return head, rows


def _even(key: str) -> float:
    """Return how far `cost` is above the better policy where copying takes about the same time as
    recomputing."""
    found = figures("streaming-append-profiles")["append ×10, two H200, even"]
    return float(found["cost"][key] / min(found[name][key] for name in ("recompute", "swap")) - 1)


call("streams.even.mean")(lambda: _even("mean"))
call("streams.even.p99")(lambda: _even("p99"))


@call("streams.update.p99")
def _update_p99() -> float:
    found = figures("streaming-update")["update 0.95"]
    return float(found["no streaming"]["p99"] / found["slo cost"]["p99"])


@table("streams/pairs", "pair_streams")
def on_pairs() -> tuple[Row, list[Row]]:
    """Return medians over the seeds, for a pair and for a unified worker."""
    rows = [
        [
            name,
            *(f"{1000 * row[key]:.1f}" for key in ("ttft_p50", "ttft_p95", "second_p50", "tpot_p50")),
            f"{100 * row['arriving_share']:.0f} %" if row["arriving_share"] else "",
        ]
        for name, row in figures("pair_streams")["rows"].items()
    ]
    head = [
        "",
        "TTFT p50, ms",
        "TTFT p95, ms",
        "second token p50, ms",
        "TPOT p50, ms",
        "KV sent while arriving",
    ]
    return head, rows


@table("streams/pairs/ratios", "pair_streams")
def pair_ratios() -> tuple[Row, list[Row]]:
    """Return the ratios between rows on the same trace, with their intervals over the seeds."""
    return ["", "median ratio (95 %)"], [
        [name.replace("_", " "), interval(median, bounds, 3)]
        for name, (median, *bounds) in figures("pair_streams")["ratios"].items()
    ]


@table("streams/pairs/live", "pair_streams_live")
def pairs_live() -> tuple[Row, list[Row]]:
    """Return medians over live rounds, and their ratios."""
    found = figures("pair_streams_live")
    rows = [
        [name, *(f"{1000 * row[key]:.1f}" for key in ("ttft_p50", "ttft_p95", "second_p50", "tpot_p50"))]
        for name, row in found["rows"].items()
    ]
    return ["", "TTFT p50, ms", "TTFT p95, ms", "second token p50, ms", "TPOT p50, ms"], rows


def _pair_gain(row: str) -> float:
    """Return how many times shorter streaming makes the median TTFT on a pair."""
    return 1 / float(figures("pair_streams")["ratios"][f"pair / {row}: ttft_p50"][0])


call("streams.pairs.arrival")(lambda: _pair_gain("pair, sent at finish, by arrival"))
call("streams.pairs.slo")(lambda: _pair_gain("pair, sent at finish"))
