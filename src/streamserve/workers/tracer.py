"""Records the work of a worker and its times, for a timeline or a trace, until the records are sent."""

from collections.abc import Callable, Sequence

from streamserve.engine.observer import LifecycleEvent, Observer
from streamserve.protocol.messages import Work


class Tracer(Observer):
    """Records steps and lifecycle events of requests, by a clock that all processes of this machine share."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._done: list[Work] = []

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        """Record a lifecycle event of a request."""
        self._done.append(Work(name, request, self._clock()))

    def on_step(self, query_tokens: Sequence[tuple[str, int]], seconds: float) -> None:
        """Record a step over the query tokens of each request that took `seconds` until now."""
        if query_tokens:
            total = sum(count for _, count in query_tokens)
            self._done.append(Work("step", "", self._clock() - seconds, seconds, total))

    def pop(self) -> list[Work]:
        """Return the work recorded since the last call."""
        done, self._done = self._done, []
        return done
