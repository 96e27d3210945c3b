"""CPU kernels compared with oneDNN."""

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, table

FILE = "kernels-amx-bfloat16"
ROWS = (6, 8, 16, 64, 510)


def column(rows: int, key: str) -> list[float]:
    """Return this measured value for every weight shape."""
    return [one[key] for shape in figures(FILE).values() for one in shape if one["rows"] == rows]


@table("kernels/amx", FILE)
def amx() -> tuple[Row, list[Row]]:
    """Return the ranges over the weight shapes."""
    rows = [
        [
            str(count),
            *(
                f"{min(column(count, key)):.2f}–{max(column(count, key)):.2f}"
                for key in ("times one row", "speed to oneDNN")
            ),
        ]
        for count in ROWS
    ]
    return ["rows", "time / one row", "speed / oneDNN in bf16 (AMX)"], rows


call("kernels.slower_at_510")(lambda: sum(one < 1 for one in column(510, "speed to oneDNN")))
call("kernels.smallest")(
    lambda: [one["speed to oneDNN"] for one in figures(FILE)["345 M out"] if one["rows"] in (6, 8, 16)]
)
