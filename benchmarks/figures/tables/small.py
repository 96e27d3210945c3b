"""Smaller measurements: the packaged model, inflated models, host time, hostile inputs, wrong profiles."""

from collections import defaultdict

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, table


@table("small/wrong-profiles", "wrong_profiles")
def wrong_profiles() -> tuple[Row, list[Row]]:
    """Return the least speed compared with plain decoding by cost curve, draft and streams."""
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in figures("wrong_profiles"):
        found[one["curve"], one["draft"]][one["streams"]].append(one["against plain"])
    streams = sorted({count for rates in found.values() for count in rates})
    rows = [
        [curve, draft, *(f"{min(rates[count]):.2f}–{max(rates[count]):.2f}" for count in streams)]
        for (curve, draft), rates in found.items()
    ]
    return ["cost curve", "draft", *(f"streams: {count}" for count in streams)], rows


call("small.wrong_profiles.least")(lambda: min(one["against plain"] for one in figures("wrong_profiles")))
call("small.wrong_profiles.cases")(lambda: len(figures("wrong_profiles")))


@table("small/hostile", "hostile")
def hostile() -> tuple[Row, list[Row]]:
    """Return the latency of a probe and the server's memory under each kind of hostile input."""
    rows = [
        [
            name.replace("_", " "),
            f"{one['p50_ms']:.1f}",
            f"{one['p99_9_ms']:.1f}",
            f"{one['max_ms']:.1f}",
            f"{one['stall_ms']:.1f}",
            f"{one['peak_rss_mb']:.0f}",
        ]
        for name, one in figures("hostile").items()
    ]
    return ["input", "p50, ms", "p99.9, ms", "largest, ms", "stall, ms", "peak memory, MB"], rows


@table("small/inflated", "inflated")
def inflated() -> tuple[Row, list[Row]]:
    """Return how close inflated models are to the original, and how their speed compares with random
    weights."""
    rows = [
        [
            one["shape"],
            f"{one['largest_logit_difference']:.1e}",
            f"{one['equal_texts']} of {one['prompts']}",
            *(f"{one['step'][count]['ratio']:.2f}" for count in ("1", "8")),
        ]
        for one in figures("inflated")
    ]
    head = [
        "shape",
        "largest difference of logits (float32)",
        "equal greedy texts",
        "step of 1 row",
        "of 8 rows",
    ]
    return head, rows


@table("small/host", "host_cost")
def host() -> tuple[Row, list[Row]]:
    """Return the parts of a step in microseconds."""
    rows = [
        [
            str(one["streams"]),
            *(f"{one[key]:,.0f}" for key in ("plan", "forward", "sampling", "commit")),
            f"{one['host share'] * 100:.1f} %",
        ]
        for one in figures("host_cost")["345 M"]
    ]
    return ["streams", "plan, µs", "forward, µs", "sampling, µs", "commit, µs", "host's share"], rows


@table("small/embedded", "embedded_quality")
def embedded() -> tuple[Row, list[Row]]:
    """Return scores of the packaged model on held-out tasks, and mean acceptance of its draft."""
    rows = [
        [
            family,
            f"{one['scores']['replies']:.0f}",
            f"{one['scores']['all'] * 100:.0f} %",
            *(f"{one['acceptance'][kind]['draft']['mean']:.2f}" for kind in ("greedy", "T=1")),
        ]
        for family, one in figures("embedded_quality").items()
    ]
    return ["family", "replies", "score", "acceptance of the draft, greedy", "T=1"], rows
