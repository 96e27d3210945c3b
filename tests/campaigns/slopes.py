"""The growth of a process's memory: samples, and the slope of a line through them."""

from dataclasses import dataclass, field
from typing import Any

import psutil

WARM_SHARE = 0.3
"""Share of the samples at the beginning that count as warm-up."""


@dataclass
class Growth:
    """The resident size of one process over time."""

    minutes: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def add(self, minute: float, process: psutil.Process) -> None:
        """Take a sample: resident memory without shared pages."""
        with process.oneshot():
            memory = process.memory_info()
        self.minutes.append(minute)
        self.megabytes.append((memory.rss - memory.shared) / 1e6)

    def figures(self) -> dict[str, Any]:
        """Return the slope after warm-up in MB per minute, and the samples that it is computed from."""
        warm = int(len(self.minutes) * WARM_SHARE)
        minutes, megabytes = self.minutes[warm:], self.megabytes[warm:]
        return {
            "slope_mb_per_minute": None if len(minutes) < 3 else round(slope(minutes, megabytes), 3),
            "first_mb": round(megabytes[0], 1) if megabytes else None,
            "last_mb": round(megabytes[-1], 1) if megabytes else None,
            "minutes": round(minutes[-1] - minutes[0], 2) if minutes else 0.0,
            "samples": len(minutes),
        }


def slope(x: list[float], y: list[float]) -> float:
    """Return the slope of the least-squares line; 0 if all `x` are equal."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    variance = sum((value - mean_x) ** 2 for value in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / variance if variance else 0.0
