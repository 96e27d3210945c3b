"""The worker supervisor: which workers of a server are ready, match the others' KV format, died or are stuck,
and when a dead one is restarted. What happens to its requests is decided by the Fleet.

    Ready, Failed, WorkerLost, Tick  ──▶  WorkerSupervisor  ──▶  Start, Kill
"""

from collections.abc import Collection, Iterator, Mapping

from streamserve.fleet.availability import Availability, Where
from streamserve.fleet.events import Heartbeat, Kill, Retire, Start
from streamserve.fleet.process_state import SupervisionPolicy, Watch
from streamserve.fleet.worker_state import Topology, WorkerState, counted, total
from streamserve.protocol.messages import Failed, Ready
from streamserve.protocol.reports import Report
from streamserve.protocol.transfers import kv_fingerprint

MISFIT_STARTS = 3
"""Starts with another model after which its files count as replaced for good: they may be being copied."""

MAX_STANDSTILL = 10.0
"""Seconds for which a worker's steps may compute nothing although a sequence could be computed."""


class WorkerSupervisor:
    """The workers of one server. One that shows no progress for `stuck_after` seconds counts as stuck."""

    def __init__(self, topology: Topology, stuck_after: float) -> None:
        self.workers = {name: WorkerState() for name in topology.names}
        self.availability = Availability(topology, self.workers, stuck_after)
        self.deaths = 0
        self.adopted = 0
        """Workers that served another head before."""
        self.served: Ready | None = None
        """What the worker that joined last has loaded, which is the same in all of them."""
        self.ended: Report | None = None
        """The counters of workers that have ended: the sums of a fleet never fall."""
        self._policy = SupervisionPolicy(stuck_after)
        self._watch = Watch()
        self._was_ready = False
        self._next: dict[str, int] = {}
        """The next incarnations of workers that were removed."""

    def start(self, now: float) -> list[Start]:
        """Return the commands that start the workers."""
        for worker in self.workers.values():
            worker.starts(now)
        return [Start(name, worker.incarnation) for name, worker in self.workers.items()]

    def add(self, names: Collection[str], now: float) -> Iterator[Start]:
        """Add workers; yield the commands that start them. A name that a worker had before goes on with its
        incarnations, so that messages of that one are not taken for the new one's."""
        self.availability.arrange(self.availability.topology.joined_by(names))
        for name in names:
            self.workers[name] = worker = WorkerState(self._next.get(name, 1))
            worker.starts(now)
            yield Start(name, worker.incarnation)

    def remove(self, names: Collection[str]) -> Iterator[Retire]:
        """Remove workers; yield the commands that end their processes."""
        self.availability.arrange(self.availability.topology.without(names))
        for name in names:
            worker = self.workers.pop(name)
            self._keep_counters(worker)
            self._next[name] = worker.incarnation + 1
            yield Retire(name, worker.incarnation)

    def is_current(self, name: str, incarnation: int) -> bool:
        """Return whether `incarnation` is the worker's present process."""
        worker = self.workers.get(name)
        return worker is not None and incarnation == worker.incarnation and not worker.failure

    def hear(self, name: str, incarnation: int, now: float) -> WorkerState | None:
        """Record a sign of life of a worker and return its state; None if the message is from an earlier
        process or the worker has failed."""
        if not self.is_current(name, incarnation):
            return None
        self.workers[name].hear(now)
        return self.workers[name]

    def join(self, name: str, ready: Ready, now: float) -> bool:
        """Record that a worker has loaded its model. A worker whose KV format differs from the others' is
        failed; returns False then."""
        mismatch = _mismatch(name, ready, self.workers)
        if mismatch:
            self.fail(name, mismatch)
            return False
        self.workers[name].join(ready, now)
        self.served = ready
        self.adopted += ready.adopted
        self._was_ready = self._was_ready or self.availability.health()[0]
        return True

    def expected(self, name: str) -> str:
        """Return the fingerprint of the model that a worker has to load: that of the others, if one is
        ready."""
        ready = (worker.ready for other, worker in self.workers.items() if other != name and worker.ready)
        return next((each.model.fingerprint for each in ready), "")

    def fail(self, name: str, failure: Failed) -> None:
        """Record that a worker cannot serve its model. This is final if no request could be served yet."""
        self.workers[name].fail(failure, final=not self._was_ready)

    def outdated(self, now: float) -> Iterator[Kill]:
        """Kill the workers that serve, if they cannot do so without one that loads another model again and
        again: all have to load the new one then."""
        workers = self.workers
        misfits = [name for name, worker in workers.items() if worker.misfit]
        if not any(workers[name].failed_starts >= MISFIT_STARTS - 1 for name in misfits):
            return
        if self.availability.topology.complete(Where(lambda name: name not in misfits)):
            return
        for name, worker in workers.items():
            if worker.ready:
                reason = (
                    "the model's files were replaced, and this worker cannot serve without "
                    f"{misfits[0]}, which has the new model"
                )
                if worker.condemn(reason, now, self._policy, "outside"):
                    yield Kill(name, reason)

    def lose(self, name: str, reason: str, now: float, blamed: bool = False) -> list[Start]:
        """Record the end of a worker's process and return the commands that restart it. The restart has no
        back-off if a request is `blamed`. A worker that never became ready is not restarted while no request
        could be served yet, and one that is leaving is not restarted at all."""
        worker = self.workers[name]
        self.deaths += 1
        self._keep_counters(worker)
        wait = worker.lose(reason, now, self._policy, final=not self._was_ready, blamed=blamed)
        return [] if wait is None or worker.leaving else [Start(name, worker.incarnation, wait)]

    def _keep_counters(self, worker: WorkerState) -> None:
        """Add the counters of a worker's last report to those of workers that have ended."""
        if worker.report is not None:
            self.ended = total(report for report in (self.ended, counted(worker.report)) if report)
        worker.report = None

    def tick(
        self, now: float, beats: Mapping[tuple[str, int], Heartbeat], waiting: bool = False
    ) -> Iterator[Kill]:
        """Mark workers that are silent or hang in a step as stuck; kill those that have work or remain so,
        and those whose steps compute nothing although a sequence could be computed. `waiting`: whether
        requests wait for a worker."""
        since = self._watch.look(now)
        for name, worker in self.workers.items():
            beat, busy = beats.get((name, worker.incarnation)), waiting or not worker.idle
            kill = worker.tick(beat, now, self._policy, since, busy)
            still = worker.report.standstill_seconds if worker.ready and worker.report else 0.0
            if still > MAX_STANDSTILL:
                reason = f"its steps computed nothing for {still:.0f} s, although requests wait"
                kill = worker.condemn(reason, now, self._policy, "fault")
            if kill:
                yield Kill(name, worker.last_words)


def _mismatch(name: str, ready: Ready, workers: Mapping[str, WorkerState]) -> Failed | None:
    """Return why a worker cannot exchange KV with the others, or None. Those that are ready are alike: it is
    compared with the first."""
    there = ((other, worker.ready) for other, worker in workers.items() if other != name and worker.ready)
    other, first = next(there, ("", None))
    if first is None:
        return None
    own, theirs = ready.model.numerics, first.model.numerics
    if own != theirs:
        return Failed(
            f"its numerics are {own!r}, but worker {other} has {theirs!r}: workers share KV and continue "
            "each other's requests, so all need the same numerics: start the server with --numerics "
            "native or portable",
            1,
            misfit=True,
        )
    own, theirs = _kv_format(ready), _kv_format(first)
    if own != theirs:
        return Failed(
            f"its KV format is {own}, but worker {other} has {theirs}: if the files of the model were "
            "replaced, restore the old ones, or restart the server to serve the new ones",
            1,
            misfit=True,
        )
    return None


def _kv_format(ready: Ready) -> str:
    return kv_fingerprint(ready.model.kv_name, ready.block_size, ready.draft)
