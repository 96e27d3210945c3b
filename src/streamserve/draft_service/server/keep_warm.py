"""Keep-warm controller: whether dummy passes keep a draft model warm while it is idle, and whether that pays.

After an idle gap the first draft passes may take longer: caches hold other data, clock rates went down.
Periodic dummy passes while idle prevent that; but they cost power, and a request that arrives during a pass
waits for it. So gaps with and without dummy passes are tried alternately, a few gaps each, and the way with
faster answers, waiting included, is used.
"""

from collections import deque
from statistics import fmean, median
from typing import Literal

KeepWarm = Literal["auto", "always", "never"]

GAP = 0.002
"""Minimum seconds without work that count as a gap."""
PASS_INTERVAL = 0.004
"""Seconds of idleness between two dummy passes."""
LONGEST = 1.0
"""Seconds of idleness after which no request is expected any more, and dummy passes stop."""
TRIAL_GAPS = 16
"""Gaps for which one of the two ways is tried."""
SAMPLES = 48
"""Number of gaps that must have been measured with each of the two ways; also the number that is
remembered."""
PAYS = 0.95
"""Dummy passes stay on if an answer with them takes at most this share of its time without them."""
RETRIAL_GAPS = 1024
"""Gaps after which the other way is tried again, in case conditions have changed."""
OUTLIER_FACTOR = 3.0
"""A value counts as at most this many times the median."""


class KeepWarmController:
    """Decides when dummy passes are due, from the lengths of gaps and the time of the draft pass after each
    gap."""

    def __init__(self, mode: KeepWarm) -> None:
        self._mode = mode
        self._seen: dict[bool, deque[float]] = {False: deque(maxlen=SAMPLES), True: deque(maxlen=SAMPLES)}
        self._trying = mode == "always"
        self._gaps = 0
        self._after_gap = False
        self._last: float | None = None
        self._passed = float("-inf")
        self.passes = 0

    @property
    def on(self) -> bool:
        """Whether dummy passes are made now, including as a trial."""
        return self._trying

    def cost(self, warm: bool) -> float:
        """Return the seconds of waiting and drafting per tree level after a gap; 0 if unknown."""
        seen = self._seen[warm]
        if not seen:
            return 0.0
        cap = OUTLIER_FACTOR * median(seen)
        return fmean(min(value, cap) for value in seen)

    @property
    def pays(self) -> bool:
        """Whether keeping warm is known to pay."""
        return self._known and self.cost(True) < PAYS * self.cost(False)

    @property
    def _known(self) -> bool:
        return all(len(seen) == SAMPLES for seen in self._seen.values())

    def gap(self, seconds: float) -> None:
        """Record that work resumes after `seconds` seconds without work."""
        self._after_gap = GAP <= seconds < LONGEST

    def drafted(self, seconds: float | None, now: float) -> None:
        """Record the seconds of a batch per level of its trees, waiting included; None if it is not
        comparable."""
        self._last = now
        if not self._after_gap:
            return
        self._after_gap = False
        if seconds is not None:
            self._seen[self._trying].append(seconds)
        if self._mode == "auto":
            self._gaps += 1
            if self._gaps % TRIAL_GAPS == 0:
                self._choose()

    def due(self, now: float) -> float | None:
        """Return the seconds until a dummy pass is due, 0 if one is due now; None if none will be."""
        if not self._trying or self._last is None:
            return None
        at = max(self._last, self._passed) + PASS_INTERVAL
        return None if max(at, now) - self._last > LONGEST else max(0.0, at - now)

    def warmed(self, now: float) -> None:
        """Record a dummy pass."""
        self._passed = now
        self.passes += 1

    def _choose(self) -> None:
        """Choose the way for the next gaps."""
        if not self._known:
            self._trying = not self._trying
        else:
            # Conditions may have changed: after each RETRIAL_GAPS gaps, use the slower way for TRIAL_GAPS
            # gaps.
            again = self._gaps % RETRIAL_GAPS < TRIAL_GAPS
            self._trying = self.pays != again
