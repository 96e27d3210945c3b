"""The workers as a crew: who serves, who fits the others, who died, was silent for too long, or is to rest;
and when a dead one is started anew. What becomes of its requests is the fleet's business.

    Ready, Failed, Lost, Tick  ──▶  Crew  ──▶  Start, Kill
"""

from collections.abc import Iterator

from streamserve.control.events import Kill, Start
from streamserve.control.workers import Topology, WorkerState
from streamserve.protocol.messages import Failed, Ready
from streamserve.protocol.tickets import kv_fingerprint

KILL_AFTER = 4
"""A worker that has been silent this many times as long as counts as stuck is killed."""

BACK_OFF = 0.5
"""Seconds until a worker is started anew after its second loss in a row, doubled by each further one; after
the first it is at once."""


class Crew:
    """All workers of one server. One that says nothing for `stuck_after` seconds counts as stuck. After
    `max_restarts` losses in `restart_window` seconds a worker stays down."""

    def __init__(
        self, topology: Topology, stuck_after: float, max_restarts: int, restart_window: float
    ) -> None:
        self.topology = topology
        self.workers = {name: WorkerState() for name in topology.names}
        self._stuck_after = stuck_after
        self._max_restarts = max_restarts
        self._restart_window = restart_window

    def start(self, now: float) -> list[Start]:
        """The commands that bring up the workers."""
        for worker in self.workers.values():
            worker.heard_at = now
        return [Start(name, worker.incarnation) for name, worker in self.workers.items()]

    def serving(self) -> set[str]:
        """Those that serve, or will when they have started."""
        return {name for name, worker in self.workers.items() if not worker.failure}

    def open(self) -> set[str]:
        """Those of them that are to get requests: who is draining gets none while there is a place without
        it."""
        serving = self.serving()
        working = {name for name in serving if not self.workers[name].draining}
        return working if self.topology.complete(working) else serving

    def closed(self) -> str:
        """Why there is no place for a new request, nor will be soon; empty if there is."""
        serving = self.serving()
        if not self.topology.complete(serving):
            return self.health()[1]
        draining = {name for name, worker in self.workers.items() if worker.draining}
        if self.topology.complete(serving - draining):
            return ""
        return f"draining: {', '.join(sorted(draining))}"

    def health(self) -> tuple[bool, str]:
        """Whether requests are being served, and if not, why."""
        well = {name: w for name, w in self.workers.items() if w.ready and not w.stuck and not w.draining}
        if self.topology.complete(well):
            return True, "ready"
        for name, worker in self.workers.items():
            if worker.failure:
                return False, f"worker {name} is down: {worker.failure.error}"
            if worker.ready is None:
                return False, f"worker {name} is loading its model"
            if worker.stuck:
                return False, f"worker {name} has said nothing for {self._stuck_after:g} seconds"
        return False, self.closed() or "no place is whole"

    def hear(self, name: str, incarnation: int, now: float) -> WorkerState | None:
        """A worker that said something; None if it is not the one that lives, or serves no more."""
        worker = self.workers[name]
        if incarnation != worker.incarnation or worker.failure:
            return None
        worker.heard_at, worker.stuck = now, False
        return worker

    def join(self, name: str, ready: Ready) -> bool:
        """A worker has loaded its model. One whose KV does not fit the others' is not taken."""
        worker = self.workers[name]
        worker.failure = self._misfit(name, ready)
        if worker.failure:
            worker.ready = None
            return False
        worker.join(ready)
        return True

    def lose(self, name: str, incarnation: int, reason: str, now: float) -> list[Start] | None:
        """A worker's process has ended: it is started anew, unless that has been tried often enough. None if
        that is no news."""
        worker = self.workers[name]
        if incarnation != worker.incarnation or worker.failure:
            return None
        never_ready = worker.incarnation == 1 and worker.ready is None
        worker.ready = worker.report = None
        worker.losses = [t for t in worker.losses if now - t < self._restart_window] + [now]
        if never_ready or len(worker.losses) > self._max_restarts:
            worker.failure = Failed(reason, 1)
            return []
        worker.incarnation += 1
        worker.heard_at = now
        further = len(worker.losses) - 1
        return [Start(name, worker.incarnation, BACK_OFF * 2 ** (further - 1) if further else 0.0)]

    def tick(self, now: float) -> Iterator[Kill]:
        """Look who has gone silent; who stays so is killed."""
        for name, worker in self.workers.items():
            silence = now - worker.heard_at
            worker.stuck = worker.ready is not None and silence > self._stuck_after
            if worker.stuck and silence > KILL_AFTER * self._stuck_after:
                worker.heard_at = now
                yield Kill(name)

    def _misfit(self, name: str, ready: Ready) -> Failed | None:
        """Why a worker cannot exchange KV with the others, if it cannot."""
        for other, worker in self.workers.items():
            if other == name or worker.ready is None:
                continue
            own, theirs = _kv_format(ready), _kv_format(worker.ready)
            if own != theirs:
                return Failed(f"its KV is of {own}, that of worker {other} of {theirs}", 1)
        return None


def _kv_format(ready: Ready) -> str:
    return kv_fingerprint(ready.model.fingerprint, ready.block_size, ready.draft)
