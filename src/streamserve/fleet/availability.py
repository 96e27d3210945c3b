"""Questions about the workers' present states: whether requests can be served, by which workers, and if not,
how long that will take. Answering a question changes nothing."""

import contextlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from streamserve.fleet.worker_state import Topology, WorkerState

UNKNOWN_RETRY_AFTER = 5.0
"""Retry-After in seconds while it is unknown when requests can be served."""


@dataclass(frozen=True)
class Where(Container[str]):
    """The workers for which a condition holds. The condition is checked for one worker at a time: a fleet may
    have a thousand workers, and most questions are decided by the first."""

    holds: Callable[[str], bool]

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, str) and self.holds(worker)


@dataclass
class Availability:
    """The `workers` of one server in a `topology`, which the supervisor changes. A worker that shows no
    progress for `stuck_after` seconds counts as stuck.

    `remaining` is the topology without leaving workers, whose partners are combined again. If it could not
    serve, `remaining` is the whole topology.
    """

    topology: Topology
    workers: Mapping[str, WorkerState]
    stuck_after: float
    remaining: Topology = field(init=False)

    def __post_init__(self) -> None:
        self.remaining = self.topology

    def arrange(self, topology: Topology) -> None:
        """Set the topology. Called with the same topology again after workers have begun to leave."""
        self.topology = self.remaining = topology
        leaving = {name for name in topology.names if name in self.workers and self.workers[name].leaving}
        with contextlib.suppress(ValueError):
            self.remaining = topology.without(leaving)

    @property
    def placing(self) -> Topology:
        """The topology in which new requests are placed: without leaving workers, if it can serve."""
        active = Where(self._active)
        return self.remaining if self.remaining.complete(active) else self.topology

    def serving(self) -> set[str]:
        """Return the workers that serve or will serve soon."""
        return {name for name, worker in self.workers.items() if not worker.down}

    @property
    def can_serve(self) -> bool:
        """Whether requests can be served now, or once starting workers are ready."""
        return self.topology.complete(Where(lambda name: not self.workers[name].down))

    def open(self) -> set[str]:
        """Return the workers that may get new requests. Draining workers are left out if the others can serve
        without them."""
        serving = self.serving()
        active = {name for name in serving if not self.workers[name].draining}
        return active if self.placing.complete(active) else serving

    def takes_new(self, worker: str) -> bool:
        """Return whether a worker is in `open()`."""
        state = self.workers[worker]
        return not state.down and (not state.draining or not self._others_serve)

    @property
    def _others_serve(self) -> bool:
        """Whether the workers that are not draining can serve by themselves."""
        return self.placing.complete(Where(self._active))

    def _active(self, worker: str) -> bool:
        state = self.workers[worker]
        return not state.down and not state.draining

    def staying(self) -> set[str]:
        """Return the workers that can serve now and are not draining."""
        return {name for name, worker in self.workers.items() if worker.healthy and not worker.draining}

    def candidate_of(self, worker: str) -> frozenset[str]:
        """Return the first route candidate that contains a worker."""
        return self.topology.candidate_of(worker)

    def is_healthy(self, candidate: frozenset[str]) -> bool:
        """Return whether all workers of a route candidate are ready and not stuck."""
        return all(self.workers[name].healthy for name in candidate)

    def unavailable_reason(self) -> str:
        """Return why no new request can be served now or soon; "" if one can."""
        if not self.can_serve:
            return self.health()[1]
        if self._others_serve:
            return ""
        draining = {name for name, worker in self.workers.items() if worker.draining}
        return f"draining: {', '.join(sorted(draining))}"

    def health(self) -> tuple[bool, str]:
        """Return whether requests are being served, and if not, the reason."""
        if self.placing.complete(self.staying()):
            return True, "ready"
        for name, worker in self.workers.items():
            if trouble := self._trouble(name):
                return False, trouble
            if worker.ready is None:
                return False, f"worker {name} is loading its model"
        return False, self.unavailable_reason() or "no set of workers that can serve a request is ready"

    def missing(self) -> str:
        """Return which workers should serve but do not, and why; "" if there are none."""
        return "; ".join(trouble for name in self.workers if (trouble := self._trouble(name)))

    def _trouble(self, name: str) -> str:
        """Return why a worker does not serve; "" if it serves, or is loading its model without an earlier
        error."""
        worker = self.workers[name]
        if worker.failure:
            return f"worker {name} is down: {worker.failure.error}"
        if worker.ready is None and worker.error:
            times = f" ({worker.failed_starts} starts failed)" if worker.failed_starts else ""
            state = (
                "does not match the other workers and is not used" if worker.misfit else "is being restarted"
            )
            return f"worker {name} {state}{times}: {worker.error}"
        if worker.stuck:
            silent = f"it has not responded for {self.stuck_after:g} seconds"
            return f"worker {name} is stuck: {worker.last_words or silent}"
        return ""

    def recovery(self, now: float) -> float | None:
        """Return the expected seconds until requests are served: 0 if they are served now, None if
        unknown."""
        seconds = [
            max(worker.until_ready(now) for worker in workers)
            for candidate in self.placing.candidates()
            for workers in ([self.workers[name] for name in candidate],)
            if not any(worker.failure or worker.draining for worker in workers)
        ]
        return min(seconds, default=None)

    def retry_after(self, now: float) -> float:
        """Return the Retry-After, in seconds, for clients while requests are not served."""
        return self.recovery(now) or UNKNOWN_RETRY_AFTER
