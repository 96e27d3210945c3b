"""Weights and KV of 8 and 4 bits: speed of the matrix products, and quality of the packaged model."""

from benchmarks.figures.files import figures

from .base import Row, table

INTEL, AMD = "widths-avx512", "widths-avx512_bf16"
SHAPE = "1 B gate, up"
WIDTHS = ("int8", "int4", "int4:32")


def speeds(file: str) -> tuple[Row, list[Row]]:
    """Return the speed of each width relative to bf16, by number of rows."""
    rows = [
        [str(entry["rows"]), *(f"{entry[width]['speed']:.2f}" for width in WIDTHS)]
        for entry in figures(file)[SHAPE]
    ]
    return ["rows", *WIDTHS], rows


def speeds_and_shares(file: str) -> tuple[Row, list[Row]]:
    """Return speeds, and the share of the multipliers' rate at each width."""
    head, rows = speeds(file)
    shares = [
        [f"{entry[width]['share of multipliers']:.0%}" for width in ("none", *WIDTHS)]
        for entry in figures(file)[SHAPE]
    ]
    columns = [*head, "share of the multipliers: bf16", *WIDTHS]
    return columns, [[*row, *share] for row, share in zip(rows, shares, strict=True)]


@table("widths/intel", INTEL)
def intel() -> tuple[Row, list[Row]]:
    """Return speeds and shares of the multipliers' rate on the Intel processor."""
    return speeds_and_shares(INTEL)


@table("widths/amd", AMD)
def amd() -> tuple[Row, list[Row]]:
    """Return speeds and shares of the multipliers' rate on the AMD processor."""
    return speeds_and_shares(AMD)


@table("attention/amd", "attention-avx512_bf16")
def attention() -> tuple[Row, list[Row]]:
    """Return the time of a layer's attention, and its share of the multipliers' rate or of the memory
    bandwidth."""
    rows = []
    for model, entries in figures("attention-avx512_bf16").items():
        for entry in entries:
            prefill = entry["step"].startswith("1 × 512")
            share = "share of multipliers" if prefill else "share of bandwidth"
            widths = [entry[width] for width in ("bfloat16", "int8")]
            cells = [f"{one['microseconds']:,.0f} µs, {one[share]:.0%}" for one in widths]
            rows.append([model, entry["step"], *cells])
    return ["heads of", "rows", "KV in bf16", "in 8 bits"], rows


@table("widths/quality", "width_quality")
def quality() -> tuple[Row, list[Row]]:
    """Return perplexity, divergence from 16 bits, agreement with 16 bits, mean scores, and acceptance."""
    rows = []
    for width, measured in figures("width_quality").items():
        weights, tasks = measured["weights"], dict(measured["tasks"])
        acceptance = tasks.pop("acceptance")
        rows.append(
            [
                width,
                f"{weights['perplexity']:.4f}",
                f"{weights['divergence']:.5f}",
                f"{weights['same greedy token']:.1%}",
                f"{sum(tasks.values()) / len(tasks):.1%}",
                f"{acceptance:.1%}",
            ]
        )
    return ["width", "perplexity", "KL, nats", "same greedy token", "mean score", "acceptance"], rows


@table("widths/formats", "format_agreement")
def formats() -> tuple[Row, list[Row]]:
    """Return agreement with the dequantized weights in float32, by format."""
    rows = [
        [name, f"{measured['same greedy token']:.2%}", f"{measured['divergence']:.5f}"]
        for name, measured in figures("format_agreement").items()
    ]
    return ["format", "same greedy token", "KL, nats"], rows
