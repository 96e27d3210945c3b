"""Installation: from an empty environment to the first token."""

from typing import Any

from benchmarks.figures.files import figures

from .base import Row, table


def value(step: dict[str, Any], key: str, digits: int = 0) -> str:
    """Return a measured value of a step; an empty string if the step has none."""
    return f"{step[key]:,.{digits}f}" if key in step else ""


@table("installing/first-hour", "first_hour")
def first_hour() -> tuple[Row, list[Row]]:
    """Return time and size of each step."""
    rows = [
        [
            f"`{step['step']}`" if "," not in step["step"] else step["step"],
            value(step, "download_mb"),
            value(step, "download_seconds", 1),
            value(step, "seconds", 1),
            value(step, "disk_mb"),
        ]
        for step in figures("first_hour")["steps"]
    ]
    return ["step", "download, MB", "download, s", "time, s", "on disk, MB"], rows
