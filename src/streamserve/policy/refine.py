"""A cost curve that learns: what a profile said, corrected by what steps really took."""

from collections.abc import Callable

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Rows at which a new bin of corrections begins."""

RATE = 0.1
"""Share of a new observation in a bin's correction."""

LIMIT = 3.0
"""A single observation counts as at most this factor above or below what was expected: machines hiccup."""


class RefinedCost:
    """Seconds of a step from its rows and the KV tokens it reads. Corrections are factors by bins of rows; a
    bin that was never seen borrows that of the nearest one."""

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        self._prior = prior
        self._factors: dict[int, float] = {}

    def __call__(self, rows: int, kv_tokens: int) -> float:
        return self._prior(rows, kv_tokens) * self._factor(_bin(rows))

    @property
    def observed(self) -> bool:
        """Whether any step was ever seen."""
        return bool(self._factors)

    def observe(self, rows: int, kv_tokens: int, seconds: float) -> None:
        """Take in that a step took `seconds`."""
        place = _bin(rows)
        now = seconds / self._prior(rows, kv_tokens)
        if place not in self._factors:
            # The first look at a bin: trust it as it is, but where others are known, not blindly.
            known = self._factor(place)
            self._factors[place] = min(max(now, known / LIMIT), known * LIMIT) if self._factors else now
            return
        known = self._factors[place]
        now = min(max(now, known / LIMIT), known * LIMIT)
        self._factors[place] = known + RATE * (now - known)

    def _factor(self, place: int) -> float:
        if not self._factors:
            return 1.0
        nearest = min(self._factors, key=lambda other: (abs(other - place), other))
        return self._factors[nearest]


def _bin(rows: int) -> int:
    place = 0
    while place + 1 < len(EDGES) and EDGES[place + 1] <= rows:
        place += 1
    return place
