"""A token bucket, the usual rate limit: an allowance that grows with time up to a burst."""


class TokenBucket:
    """An allowance that grows by `rate` a second up to `burst`; full at the time `now`. `level` is the
    allowance at the last call; its owner may subtract from it, also below 0."""

    def __init__(self, rate: float, burst: float, now: float = 0.0) -> None:
        self.rate, self.burst, self.level = rate, burst, burst
        self._at = now

    def wait(self, amount: float, now: float, rate: float | None = None) -> float:
        """Return the seconds until `amount` (at most the burst) is available; 0 if it is now. `rate` is used
        in place of the bucket's."""
        rate = self.rate if rate is None else rate
        self.level = min(self.burst, self.level + max(0.0, now - self._at) * rate)
        self._at = max(self._at, now)
        missing = min(amount, self.burst) - self.level
        return 0.0 if missing <= 0.0 else missing / max(rate, 1e-9)

    def spend(self, amount: float, now: float) -> bool:
        """Subtract `amount`; return False, and subtract nothing, if there is not enough."""
        self.wait(amount, now)
        if amount > self.level + 1e-9 * self.burst:  # rounding: the time that `wait` returned must suffice
            return False
        self.level -= amount
        return True
