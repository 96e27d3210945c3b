"""Virtual time: a heap of scheduled actions, and the time of the action that runs."""

import heapq
import itertools
from collections.abc import Callable
from math import inf

Action = Callable[[], None]
"""An action that is run at a time. It may schedule others."""


class VirtualClock:
    """A clock that advances from one scheduled action to the next. Calling it returns the time in seconds.
    Actions at the same time run in the order in which they were scheduled."""

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
        """Schedule an action `seconds` from now. With 0, it runs when the present action has returned."""
        self.at(self.now + seconds, action)

    def run(self, until: float = inf) -> None:
        """Run all actions, or all actions up to the time `until`."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
