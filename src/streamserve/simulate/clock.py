"""Virtual time: a heap of scheduled actions, and the time of the one that runs."""

import heapq
import itertools
from collections.abc import Callable
from math import inf

Action = Callable[[], None]
"""What happens at a time; it may schedule others."""


class VirtualClock:
    """A clock that advances from one scheduled action to the next; calling it returns seconds. Actions of the
    same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    @property
    def pending(self) -> bool:
        """Whether any action is scheduled."""
        return bool(self._heap)

    def at(self, time: float, action: Action) -> None:
        """Schedule an action at `time`."""
        heapq.heappush(self._heap, (time, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Schedule an action `seconds` from now; with 0, when the present one has returned."""
        self.at(self.now + seconds, action)

    def run(self, until: float = inf) -> None:
        """Run all actions, or those up to the time `until`."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
