"""Stream pairs, routers, and StreamServe's tables."""

import re
from statistics import median
from typing import Any

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, table

TRANSFERS = {
    "shared memory": "shared memory",
    "NIXL": "NIXL",
    "all at the end": "shared memory, all at the end (one chunk: a blocking copy)",
    "a wire that takes half of prefill": "a transport throttled to half of the prefill time, layer by layer",
    "the same, all at the end": "the same transport, all at the end",
}
PROMPTS = 12
"""Number of prompts in the transfer part (`settings.prompts`). The file has the sum of their seconds."""


def _ms(seconds: float, digits: int = 0) -> str:
    return f"{seconds * 1e3:.{digits}f} ms"


@table("pairs/transfer", "pairs_live")
def transfer() -> tuple[Row, list[Row]]:
    """Return prefill time and exposed transfer time, per prompt."""
    rows = []
    for key, label in TRANSFERS.items():
        one = figures("pairs_live")["transfer"][key]
        exposed = one["exposed_seconds"] / PROMPTS
        rows.append(
            [
                label,
                _ms(one["prefill_seconds"] / PROMPTS),
                _ms(exposed, 0 if exposed > 0.01 else 1),
                f"{one['exposed_share'] * 100:.1f} %",
            ]
        )
    return ["transport", "prefill", "exposed", "share"], rows


@table("pairs/burst", "pairs_live")
def burst() -> tuple[Row, list[Row]]:
    """Return p99 inter-token latency of the streams and median TTFT of the burst."""
    bursts = figures("pairs_live")["burst"]
    names = ["a pair", *(name for name in bursts["long"] if name != "a pair")]
    rows = [
        [
            name.replace("by targets", "order `slo`"),
            *(f"{_ms(one[name]['itl_p99'], 1)}, {_ms(one[name]['ttft_p50'])}" for one in bursts.values()),
        ]
        for name in names
    ]
    return ["", *(f"{name}: p99, TTFT" for name in bursts)], rows


def crashes() -> dict[tuple[str, str], list[float]]:
    """Return the seconds until all answers were complete and the pair served again, by killed half and
    signal."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, record in figures("verify").items():
        match = re.fullmatch(r"tests/test_lifecycle_events\.py::.*\[(.*)\]", name)
        if match and (seconds := next((record[key] for key in record if "seconds" in key), None)):
            *_, half, kind = match[1].split("-")
            found.setdefault((half, kind), []).extend(seconds)
    return found


@table("pairs/crashes", "verify")
def crash_table() -> tuple[Row, list[Row]]:
    """Return median and worst seconds until service was whole again."""
    found = crashes()
    label = {"prefill": "the prefill worker", "decode": "the decode worker", "both": "both"}
    rows = []
    for half, text in label.items():
        cells = [found[half, kind] for kind in ("kill", "stop")]
        rows.append([text, *(f"{median(one):.1f} s, {max(one):.1f} s" for one in cells)])
    return ["lost", "kill -9: median, worst", "SIGSTOP: median, worst"], rows


@call("pairs.crashes")
def _crashes() -> int:
    return sum(map(len, crashes().values()))


OTHER_ROUTERS = (
    "round-robin", "random", "least-loaded", "cache-aware", "predictive", "flowguard-as-published",
)  # fmt: skip


def _cells() -> list[Any]:
    return list(figures("pairs")["played"])


def _interval(one: Any, factor: float, digits: int, sign: str = "") -> str:
    value, low, high = (f"{one[key] * factor:{sign}.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})" if sign else f"{value} ({low}–{high})"


@table("routers/virtual", "pairs")
def routers() -> tuple[Row, list[Row]]:
    """Return flowguard's goodput, and its difference to the other routers' goodput."""
    rows = [
        [
            f"{one['trace']}, {one['pairs']}",
            f"{one['routers']['flowguard']['goodput']:.1f}",
            *(_interval(one["routers"][name]["difference"], 100, 1, "+") for name in OTHER_ROUTERS),
        ]
        for one in _cells()
    ]
    return ["trace, pairs", "requests/s", *(f"− `{name}`, %" for name in OTHER_ROUTERS)], rows


@table("routers/ttft", "pairs")
def router_ttft() -> tuple[Row, list[Row]]:
    """Return p95 TTFT with flowguard, and its ratio to other routers."""
    rows = [
        [
            f"{one['trace']}, {one['pairs']}",
            _ms(one["routers"]["flowguard"]["ttft_p95"]),
            *(_interval(one["routers"][name]["ratio"], 1, 2) for name in OTHER_ROUTERS),
        ]
        for one in _cells()
    ]
    return ["trace, pairs", "flowguard", *(f"/ `{name}`" for name in OTHER_ROUTERS)], rows


@call("routers.predictive.bursty")
def _predictive_in_bursts() -> str:
    (cell,) = (one for one in _cells() if one["trace"] == "bursty" and one["pairs"] == 4)
    return _interval(cell["routers"]["predictive"]["difference"], 100, 1, "+")


@call("routers.seeds")
def _seeds() -> int:
    return min(one["seeds"] for one in _cells())


@table("routers/live", "pairs_live")
def routers_live() -> tuple[Row, list[Row]]:
    """Return p95 TTFT and attainment of each router on each trace."""
    traces = figures("pairs_live")["routers"]
    names = (
        "flowguard", "flowguard-as-published", "predictive", "round-robin", "random", "least-loaded",
        "cache-aware",
    )  # fmt: skip
    rows = [
        [
            f"`{name}`",
            *(
                f"{_ms(one[name]['ttft_p95'])}; {one[name]['attainment'] * 100:.0f} %"
                for one in traces.values()
            ),
        ]
        for name in names
    ]
    return ["p95 TTFT; attainment", *traces], rows


@table("routers/live-default", "routers_live")
def routers_live_default() -> tuple[Row, list[Row]]:
    """Return the default router and others on the same traces, with the ratios of rounds."""
    traces = figures("routers_live")["traces"]
    rows = [
        [
            f"{trace}: `{name}`",
            _ms(one["ttft_p95"]),
            f"{one['attainment'] * 100:.0f} %",
            f"{one['goodput']:.1f}",
            "" if name == "flowguard" else _interval(one["ratio"], 1, 2),
            "" if name == "flowguard" else _interval(one["difference"], 100, 1, "+"),
        ]
        for trace, routers in traces.items()
        for name, one in routers.items()
    ]
    head = ["", "p95 TTFT", "attainment", "requests/s within targets", "p95, flowguard / it"]
    return [*head, "goodput, flowguard − it, %"], rows


@call("routers.live.added")
def _added_rounds() -> str:
    """Return the difference to the published router in the most recently added rounds."""
    added = figures("routers_live")["added"]["skewed"]["flowguard-as-published"]
    return _interval(added["difference"], 100, 1, "+")


@table("streamserve/live", "streamserve_live")
def streamserve_live() -> tuple[Row, list[Row]]:
    """Return the live ablation: medians over rounds, and ratios within a round."""
    measured = figures("streamserve_live")
    rows = [
        [
            name,
            _ms(one["latency"]),
            _ms(one["p95"]),
            _ms(one["ttft"]),
            f"{one['tokens_per_second']:.0f}",
            "" if name == "full" else _interval(one["latency_ratio"], 1, 2),
            f"{measured['accepted'][name]:,}",
        ]
        for name, one in measured["systems"].items()
    ]
    return ["", "latency", "p95", "TTFT", "tokens/s", "latency, it / full", "accepted draft tokens"], rows


@call("streamserve.live.interaction")
def _live_interaction() -> str:
    return _interval(figures("streamserve_live")["interaction"], 1, 2)


@table("streamserve/latency", "streamserve_a100")
def latency() -> tuple[Row, list[Row]]:
    """Return mean latency in seconds by system and family."""
    found = figures("streamserve_a100")
    families = list(found["families"])
    systems = [
        ("streamserve", "families", "streamserve"),
        ("data parallel", "families", "data parallel"),
        ("tensor parallel", "families", "tensor parallel"),
        *((name, "ablation", name) for name in found["ablation"][families[0]] if name != "full"),
    ]
    rows = [
        [label, *(f"{found[part][family][key]['latency']:.3f}" for family in families)]
        for label, part, key in systems
    ]
    return ["", *families], rows


def _latency_ratios(part: str, above: str, below_part: str, below: str) -> list[float]:
    found = figures("streamserve_a100")
    return [
        found[part][family][above]["latency"] / found[below_part][family][below]["latency"]
        for family in found[part]
    ]


@call("streamserve.over_data_parallel")
def _over_data() -> list[float]:
    return [ratio - 1 for ratio in _latency_ratios("families", "streamserve", "families", "data parallel")]


@call("streamserve.over_monolithic")
def _over_monolithic() -> list[float]:
    return [ratio - 1 for ratio in _latency_ratios("ablation", "full", "ablation", "monolithic")]


@call("streamserve.tensor_parallel")
def _tensor_parallel() -> list[float]:
    return _latency_ratios("families", "streamserve", "families", "tensor parallel")


@call("streamserve.interaction")
def _interaction() -> list[float]:
    return list(figures("streamserve_a100")["interaction"].values())


@call("streamserve.flowguard")
def _flowguard() -> list[float]:
    """Return latency with FlowGuard divided by latency with round-robin and random routing."""
    others = ("round-robin", "no FlowGuard (random)")
    return [ratio for other in others for ratio in _latency_ratios("ablation", "full", "ablation", other)]


for _transport in TRANSFERS:

    @call(f"pairs.total.{_transport}")
    def _total(transport: str = _transport) -> float:
        """Return prefill and exposed transfer of a prompt, in seconds."""
        one = figures("pairs_live")["transfer"][transport]
        return float((one["prefill_seconds"] + one["exposed_seconds"]) / PROMPTS)


def _burst(*names: str, key: str) -> list[float]:
    long = figures("pairs_live")["burst"]["long"]
    return [long[name][key] for name in names]


CHUNKED = tuple(f"one worker, chunks of {size}" for size in (64, 128, 256, 512))
call("pairs.long.chunked")(lambda: _burst(*CHUNKED, key="itl_p99"))
call("pairs.long.longer")(
    lambda: [_burst("a pair", key="ttft_p50")[0] / one for one in _burst(*CHUNKED, key="ttft_p50")]
)
