"""The rate of an event over a sliding window."""

from collections import deque

WINDOW_SECONDS = 30.0


class Rate:
    """Amounts per second over the last `window` seconds. Does not read a clock."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._amounts: deque[tuple[float, float]] = deque()
        self._total = 0.0

    def add(self, now: float, amount: float = 1.0) -> None:
        """Record that `amount` happened at `now`."""
        self._amounts.append((now, amount))
        self._total += amount
        self._forget(now)

    def seconds_for(self, now: float, amount: float) -> float | None:
        """Return the seconds that `amount` takes at the present rate; None without recent events."""
        self._forget(now)
        if not self._amounts or self._total <= 0:
            return None
        span = max(now - self._amounts[0][0], 0.1)
        return amount * span / self._total

    def _forget(self, now: float) -> None:
        while self._amounts and now - self._amounts[0][0] > self._window:
            self._total -= self._amounts.popleft()[1]
