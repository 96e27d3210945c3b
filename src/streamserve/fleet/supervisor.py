"""The worker supervisor: which workers of a server are ready, match the others' KV format, died or are stuck,
and when a dead worker is restarted. The Fleet decides what happens to its requests.

    Ready, Failed, WorkerLost, Tick  ──▶  WorkerSupervisor  ──▶  Start, Kill
"""

from collections.abc import Collection, Mapping

from streamserve.fleet.availability import Availability, Where
from streamserve.fleet.events import Command, Heartbeat, Kill, Retire, Start
from streamserve.fleet.process_state import SupervisionPolicy, Watch
from streamserve.fleet.report_totals import counted, total
from streamserve.fleet.worker_state import Topology, WorkerState
from streamserve.protocol.messages import Failed, Ready
from streamserve.protocol.reports import Report
from streamserve.protocol.transfers import kv_fingerprint

MISFIT_STARTS = 3
"""Starts in a row with another model after which the model's files count as replaced. Before that, they may
be in the middle of being copied."""

MAX_STANDSTILL = 10.0
"""Limit of the seconds for which a worker's steps may compute nothing although a sequence could be
computed."""


class WorkerSupervisor:
    """The workers of one server. A worker that shows no progress for `stuck_after` seconds counts as
    stuck. The commands that start and end processes are appended to `commands`."""

    def __init__(self, topology: Topology, stuck_after: float, commands: list[Command]) -> None:
        self.workers = {name: WorkerState() for name in topology.names}
        self.availability = Availability(topology, self.workers, stuck_after)
        self.deaths = 0
        self.adopted = 0
        """Number of workers that served another head before."""
        self.served: Ready | None = None
        """The ready message of the worker that joined last. It describes the model, which is the same for all
        workers."""
        self.ended: Report | None = None
        """Sum of the counters of workers that have ended: the fleet's sums must never fall."""
        self.commands = commands
        self._policy = SupervisionPolicy(stuck_after)
        self._watch = Watch()
        self._was_ready = False
        self._next: dict[str, int] = {}
        """The next incarnation of each removed worker."""

    def start(self, now: float) -> None:
        for name, worker in self.workers.items():
            worker.starts(now)
            self.commands.append(Start(name, worker.incarnation))

    def add(self, names: Collection[str], now: float) -> None:
        """Add workers and start them.

        A reused name continues the incarnations of the earlier worker, so that late messages of the earlier
        worker are not taken for messages of the new worker.
        """
        self.availability.arrange(self.availability.topology.joined_by(names))
        for name in names:
            self.workers[name] = worker = WorkerState(self._next.get(name, 1))
            worker.starts(now)
            self.commands.append(Start(name, worker.incarnation))

    def remove(self, names: Collection[str]) -> None:
        """Remove workers and end their processes."""
        self.availability.arrange(self.availability.topology.without(names))
        for name in names:
            worker = self.workers.pop(name)
            self._keep_counters(worker)
            self._next[name] = worker.incarnation + 1
            self.commands.append(Retire(name, worker.incarnation))

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
        """Record that a worker has loaded its model. If its KV format differs from the others', the worker is
        failed and False is returned."""
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
        """Return the fingerprint of the model that a worker has to load: the model of the other workers; ""
        if none is ready."""
        ready = (worker.ready for other, worker in self.workers.items() if other != name and worker.ready)
        return next((each.model.fingerprint for each in ready), "")

    def fail(self, name: str, failure: Failed) -> None:
        """Record that a worker cannot serve its model. The failure is final if the server has not been able
        to serve yet."""
        self.workers[name].fail(failure, final=not self._was_ready)

    def outdated(self, now: float) -> None:
        """Kill the workers that serve, if the files of the model were replaced: a worker repeatedly loads
        another model than they have, and they cannot serve without it. All workers then load the new
        model."""
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
                    self.commands.append(Kill(name, reason))

    def lose(self, name: str, reason: str, now: float, blamed: bool = False) -> None:
        """Record the end of a worker's process and restart it. The restart has no back-off if a request is
        `blamed`. A leaving worker is not restarted, and neither is a worker that was never ready, if the
        server has not been able to serve yet."""
        worker = self.workers[name]
        self.deaths += 1
        self._keep_counters(worker)
        wait = worker.lose(reason, now, self._policy, final=not self._was_ready, blamed=blamed)
        if wait is not None and not worker.leaving:
            self.commands.append(Start(name, worker.incarnation, wait))

    def _keep_counters(self, worker: WorkerState) -> None:
        """Add the counters of a worker's last report to the sum for ended workers."""
        if worker.report is not None:
            self.ended = total(report for report in (self.ended, counted(worker.report)) if report)
        worker.report = None

    def tick(self, now: float, beats: Mapping[tuple[str, int], Heartbeat], waiting: bool = False) -> None:
        """Mark workers that are silent or make no progress in a step as stuck. Kill stuck workers (idle ones
        after a longer time), and workers whose steps compute nothing although a sequence could be computed.
        `waiting`: whether requests wait for a worker."""
        since = self._watch.look(now)
        for name, worker in self.workers.items():
            beat, busy = beats.get((name, worker.incarnation)), waiting or not worker.idle
            kill = worker.tick(beat, now, self._policy, since, busy)
            still = worker.report.standstill_seconds if worker.ready and worker.report else 0.0
            if still > MAX_STANDSTILL:
                reason = f"its steps computed nothing for {still:.0f} s, although requests wait"
                kill = worker.condemn(reason, now, self._policy, "fault")
            if kill:
                self.commands.append(Kill(name, worker.last_words))


def _mismatch(name: str, ready: Ready, workers: Mapping[str, WorkerState]) -> Failed | None:
    """Return why a worker cannot exchange KV with the others, or None. All ready workers are alike, so it is
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
