"""Weights and KV of 8 and 4 bits: speed of the matrix products, and quality of the packaged model."""

from benchmarks.figures.files import figures

from .base import Row, table

INTEL, AMD = "widths-avx512", "widths-avx512_bf16"
SHAPE = "1 B gate, up"
WIDTHS = ("int8", "int4", "int4:32")


def speeds(file: str) -> tuple[Row, list[Row]]:
    """Return the speed of each width against bf16, by rows."""
    rows = [
        [str(entry["rows"]), *(f"{entry[width]['speed']:.2f}" for width in WIDTHS)]
        for entry in figures(file)[SHAPE]
    ]
    return ["rows", *WIDTHS], rows


@table("widths/intel", INTEL)
def intel() -> tuple[Row, list[Row]]:
    """Return speeds, and the share of the multipliers' rate at each width."""
    head, rows = speeds(INTEL)
    shares = [
        [f"{entry[width]['share of multipliers']:.0%}" for width in ("none", *WIDTHS)]
        for entry in figures(INTEL)[SHAPE]
    ]
    columns = [*head, "share of the multipliers: bf16", *WIDTHS]
    return columns, [[*row, *share] for row, share in zip(rows, shares, strict=True)]


@table("widths/amd", AMD)
def amd() -> tuple[Row, list[Row]]:
    """Return speeds."""
    return speeds(AMD)


@table("widths/quality", "width_quality")
def quality() -> tuple[Row, list[Row]]:
    """Return perplexity, divergence from 16 bits and agreement with them, mean scores, and acceptance."""
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
