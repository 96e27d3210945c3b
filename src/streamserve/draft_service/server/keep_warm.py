"""Whether a draft model is kept warm while it has nothing to do, and whether that pays.

After a gap the first draft passes may take longer: caches hold other things, clocks went down. A pass that
nobody asked for, now and then while idle, prevents that; but it costs power, and who comes during one waits
for it. So both ways are tried in turn, a few gaps each, and the one stays that answered sooner, waiting
included.
"""

from collections import deque
from statistics import fmean, median
from typing import Literal

KeepWarm = Literal["auto", "always", "never"]

GAP = 0.002
"""Seconds without work from which on a gap is one."""
EVERY = 0.004
"""Seconds of idleness between two passes that nobody asked for."""
LONGEST = 1.0
"""After so many seconds nobody is expected any more, and nothing is kept warm."""
TURN = 16
"""Gaps that one of the two ways is tried for."""
KNOWN = 48
"""Gaps of each way that must have been seen, and the most that are remembered."""
PAYS = 0.95
"""Keeping warm stays on if an answer then takes at most this share of the time it takes without."""
AGAIN = 1024
"""Gaps after which the other way is tried again, in case things have changed."""
HICCUP = 3.0
"""A value counts as at most so many times the median."""


class Warmth:
    """Told of each gap and of what the draft pass after it took, says when to make a pass for nobody."""

    def __init__(self, mode: KeepWarm) -> None:
        self._mode = mode
        self._seen: dict[bool, deque[float]] = {False: deque(maxlen=KNOWN), True: deque(maxlen=KNOWN)}
        self._trying = mode == "always"
        self._gaps = 0
        self._after_gap = False
        self._last: float | None = None
        self._passed = float("-inf")
        self.passes = 0

    @property
    def on(self) -> bool:
        """Whether gaps are bridged now, be it to see what that brings."""
        return self._trying

    def cost(self, warm: bool) -> float:
        """Seconds of waiting and drafting for a level of a tree after a gap; 0 if unknown."""
        seen = self._seen[warm]
        if not seen:
            return 0.0
        most = HICCUP * median(seen)
        return fmean(min(value, most) for value in seen)

    @property
    def pays(self) -> bool:
        """Whether keeping warm has been seen to pay."""
        return self._known and self.cost(True) < PAYS * self.cost(False)

    @property
    def _known(self) -> bool:
        return all(len(seen) == KNOWN for seen in self._seen.values())

    def gap(self, seconds: float) -> None:
        """Work comes again after so many seconds without."""
        self._after_gap = GAP <= seconds < LONGEST

    def drafted(self, seconds: float | None, now: float) -> None:
        """A batch took so long for each level of its trees, waiting included; None if it is not to be
        compared."""
        self._last = now
        if not self._after_gap:
            return
        self._after_gap = False
        if seconds is not None:
            self._seen[self._trying].append(seconds)
        if self._mode == "auto":
            self._gaps += 1
            if self._gaps % TURN == 0:
                self._choose()

    def due(self, now: float) -> float | None:
        """Seconds until a pass is to be made for nobody, 0 if it is time; None if none is."""
        if not self._trying or self._last is None:
            return None
        at = max(self._last, self._passed) + EVERY
        return None if max(at, now) - self._last > LONGEST else max(0.0, at - now)

    def warmed(self, now: float) -> None:
        """Such a pass has been made."""
        self._passed = now
        self.passes += 1

    def _choose(self) -> None:
        """The way for the next gaps."""
        if not self._known:
            self._trying = not self._trying
        else:
            again = self._gaps % AGAIN < TURN
            self._trying = self.pays != again
