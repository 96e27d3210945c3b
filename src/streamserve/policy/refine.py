"""A cost curve that learns: what a profile said, corrected by what steps really took."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Rows at which a new bin of corrections begins."""

RATE = 0.1
"""Least share of a new observation in a correction."""

LIMIT = 3.0
"""A single observation counts as at most this factor above or below what was expected: machines hiccup."""

FADE = 0.99
"""What one step leaves of the weight of a bin that it did not fall into."""


@dataclass
class _Bin:
    """What steps with a bin's rows took, as a factor, and its weight when one was last seen, in steps."""

    factor: float
    weight: float
    seen: int


class RefinedCost:
    """Seconds of a step from its rows and the KV tokens it reads. Corrections are factors by bins of rows,
    beside one for all steps. A bin that has not been seen for long is taken to be like all: else one hiccup
    at the wrong time would keep a number of rows from ever being tried, and so corrected, again."""

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        self._prior = prior
        self._all = 1.0
        self._steps = 0
        self._bins: dict[int, _Bin] = {}

    def __call__(self, rows: int, kv_tokens: int) -> float:
        return self._prior(rows, kv_tokens) * self._factor(_place(rows))

    @property
    def observed(self) -> bool:
        """Whether any step was ever seen."""
        return self._steps > 0

    def observe(self, rows: int, kv_tokens: int, seconds: float) -> None:
        """Take in that a step took `seconds`."""
        place, now = _place(rows), seconds / self._prior(rows, kv_tokens)
        if self._steps:  # with nothing known the first look is trusted as it is, later ones not blindly
            known = self._factor(place)
            now = min(max(now, known / LIMIT), known * LIMIT)
        else:
            self._all = now
        self._steps += 1
        self._all += RATE * (now - self._all)
        found = self._bins.get(place)
        if found is None:
            self._bins[place] = _Bin(now, 1.0, self._steps)
            return
        found.weight = 1.0 + self._weight(found)
        found.factor += max(RATE, 1.0 / found.weight) * (now - found.factor)
        found.seen = self._steps

    def _factor(self, place: int) -> float:
        found = self._bins.get(place)
        if found is None:
            return self._all
        weight = self._weight(found)
        return (weight * found.factor + self._all) / (weight + 1.0)

    def _weight(self, found: _Bin) -> float:
        weight: float = found.weight * FADE ** (self._steps - found.seen)
        return weight


def _place(rows: int) -> int:
    return max(bisect_right(EDGES, rows) - 1, 0)
