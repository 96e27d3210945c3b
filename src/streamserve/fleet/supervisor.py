"""The worker supervisor: which workers serve, match the others' KV format, died, are stuck or draining, and
when a dead one is restarted. What happens to its requests is decided by the Fleet.

    Ready, Failed, WorkerLost, Tick  ──▶  WorkerSupervisor  ──▶  Start, Kill

Once the server has been ready, every worker that ends is restarted, with bounded exponential back-off.
"""

from collections.abc import Iterator, Mapping

from streamserve.fleet.events import Heartbeat, Kill, Start
from streamserve.fleet.worker_state import Topology, WorkerState
from streamserve.protocol.messages import Failed, Ready
from streamserve.protocol.transfers import kv_fingerprint

KILL_AFTER = 4
"""A worker is killed after it was silent for this many times the limit at which it counts as stuck."""

HANG_FACTOR = 10.0
"""A step counts as hung when it has made no progress for this many times its predicted seconds."""

BACK_OFF = 0.5
"""Seconds before a worker is restarted after its second loss in a row, doubled by each further one. After the
first loss it is restarted at once."""

MAX_BACK_OFF = 15.0
"""The longest back-off, in seconds."""

STABLE_SECONDS = 60.0
"""A loss counts as the first in a row if the worker had been ready for this many seconds, or had finished a
request."""

LOAD_SECONDS = 10.0
"""Expected seconds until a worker is ready, until a load time has been measured."""

LOAD_SILENCE = 120.0
"""Seconds without a sign of life after which a worker that is loading its model is killed. Imports of large
libraries let no other thread run."""

UNKNOWN_RETRY_AFTER = 5.0
"""Retry-After in seconds while it is unknown when requests can be served."""

GIVE_UP_STARTS = 4
"""Failed starts in a row after which requests no longer wait for a worker. It is still restarted."""


class WorkerSupervisor:
    """The workers of one server. A worker that is silent for `stuck_after` seconds counts as stuck."""

    def __init__(self, topology: Topology, stuck_after: float) -> None:
        self.topology = topology
        self.workers = {name: WorkerState() for name in topology.names}
        self.deaths = 0
        self._stuck_after = stuck_after
        self._was_ready = False

    def start(self, now: float) -> list[Start]:
        """Return the commands that start the workers."""
        for worker in self.workers.values():
            worker.heard_at = worker.starts_at = now
        return [Start(name, worker.incarnation) for name, worker in self.workers.items()]

    def serving(self) -> set[str]:
        """Return the workers that serve or will serve soon."""
        return {name for name, worker in self.workers.items() if not _is_down(worker)}

    @property
    def can_serve(self) -> bool:
        """Whether requests can be served now, or once starting workers are ready."""
        return self.topology.complete(self.serving())

    def open(self) -> set[str]:
        """Return the serving workers that may get new requests. Draining workers are left out if the others
        can serve without them."""
        serving = self.serving()
        active = {name for name in serving if not self.workers[name].draining}
        return active if self.topology.complete(active) else serving

    def is_healthy(self, candidate: frozenset[str]) -> bool:
        """Return whether all workers of a route candidate are ready and not stuck."""
        return all(_is_healthy(self.workers[name]) for name in candidate)

    def unavailable_reason(self) -> str:
        """Return why no new request can be served, now or soon; empty if one can."""
        serving = self.serving()
        if not self.topology.complete(serving):
            return self.health()[1]
        draining = {name for name, worker in self.workers.items() if worker.draining}
        if self.topology.complete(serving - draining):
            return ""
        return f"draining: {', '.join(sorted(draining))}"

    def health(self) -> tuple[bool, str]:
        """Return whether requests are being served, and if not, why."""
        healthy = {
            name for name, worker in self.workers.items() if _is_healthy(worker) and not worker.draining
        }
        if self.topology.complete(healthy):
            return True, "ready"
        for name, worker in self.workers.items():
            if worker.failure:
                return False, f"worker {name} is down: {worker.failure.error}"
            if worker.ready is None and worker.error:
                times = f" ({worker.failed_starts} starts failed)" if worker.failed_starts else ""
                return False, f"worker {name} is being restarted{times}: {worker.error}"
            if worker.ready is None:
                return False, f"worker {name} is loading its model"
            if worker.stuck:
                return False, f"worker {name} has not responded for {self._stuck_after:g} seconds"
        return False, self.unavailable_reason() or "no set of workers that can serve a request is ready"

    def recovery(self, now: float) -> float | None:
        """Return the expected seconds until requests are served, 0 if they are; None if that is unknown."""
        seconds = [
            max(self._until_ready(worker, now) for worker in workers)
            for candidate in self.topology.candidates()
            for workers in ([self.workers[name] for name in candidate],)
            if not any(worker.failure or worker.draining for worker in workers)
        ]
        return min(seconds, default=None)

    def retry_after(self, now: float) -> float:
        """Return the Retry-After, in seconds, for clients while requests are not served."""
        return self.recovery(now) or UNKNOWN_RETRY_AFTER

    def is_current(self, name: str, incarnation: int) -> bool:
        """Return whether `incarnation` is the worker's present process."""
        worker = self.workers[name]
        return incarnation == worker.incarnation and not worker.failure

    def hear(self, name: str, incarnation: int, now: float) -> WorkerState | None:
        """Record a sign of life of a worker and return its state; None if the message is from an earlier
        process or the worker has failed."""
        if not self.is_current(name, incarnation):
            return None
        worker = self.workers[name]
        worker.heard_at, worker.stuck = now, False
        return worker

    def join(self, name: str, ready: Ready, now: float) -> bool:
        """Record that a worker has loaded its model. A worker whose KV format differs from the others' is
        failed; returns False then."""
        worker = self.workers[name]
        mismatch = self._mismatch(name, ready)
        if mismatch:
            self.fail(name, mismatch)
            return False
        worker.join(ready, now)
        self._was_ready = self._was_ready or self.health()[0]
        return True

    def fail(self, name: str, failure: Failed) -> None:
        """Record that a worker cannot serve its model. This is final if no request could be served yet."""
        worker = self.workers[name]
        worker.error = worker.last_words = failure.error
        worker.ready = None
        if not self._was_ready:
            worker.failure = failure

    def reset_backoff(self, name: str) -> None:
        """Record that a worker has finished a request, which resets its back-off."""
        self.workers[name].recent_losses = 0

    def lose(self, name: str, incarnation: int, reason: str, now: float, blamed: bool = False) -> list[Start]:
        """Record the end of a worker's process and return the commands that restart it. The restart has no
        back-off if a request is `blamed`. A worker that never became ready is not restarted while no request
        could be served yet."""
        worker = self.workers[name]
        self.deaths += 1
        first = incarnation == 1 and worker.ready is None
        if worker.ready is None:
            worker.failed_starts += 1
        elif now - worker.ready_at >= STABLE_SECONDS:
            worker.recent_losses = 0
        worker.error, worker.last_words = worker.last_words or reason, ""
        worker.ready = worker.report = None
        worker.stuck = False
        if first and not self._was_ready:
            worker.failure = Failed(reason, 1)
            return []
        worker.incarnation += 1
        wait = 0.0
        if not blamed:
            wait = (
                min(BACK_OFF * 2 ** min(worker.recent_losses - 1, 9), MAX_BACK_OFF)
                if worker.recent_losses
                else 0.0
            )
            worker.recent_losses += 1
        worker.heard_at = worker.starts_at = now + wait
        return [Start(name, worker.incarnation, wait)]

    def tick(self, now: float, beats: Mapping[tuple[str, int], Heartbeat]) -> Iterator[Kill]:
        """Mark workers that are silent or hang in a step as stuck; kill those that remain so for `KILL_AFTER`
        times the limit."""
        for name, worker in self.workers.items():
            beat = beats.get((name, worker.incarnation))
            quiet, limit = self._quiet(worker, beat, now)
            worker.stuck = worker.ready is not None and quiet > limit
            if quiet > KILL_AFTER * limit and now > worker.starts_at and not worker.failure:
                worker.heard_at = now
                yield Kill(name)

    def _quiet(self, worker: WorkerState, beat: Heartbeat | None, now: float) -> tuple[float, float]:
        """Return the seconds for which a worker has shown no activity, and the limit for them. In a step,
        beats show that it is alive, and progress of the step shows that it does not hang."""
        limit = self._stuck_after
        if worker.ready is None:
            alive = max(worker.heard_at, beat.at) if beat else worker.heard_at
            return now - alive, max(limit, LOAD_SILENCE / KILL_AFTER)
        if beat is None or not beat.phase:
            return now - worker.heard_at, limit
        silent, still = now - max(worker.heard_at, beat.at), now - max(worker.heard_at, beat.moved_at)
        max_wait = max(limit, HANG_FACTOR * beat.predicted)
        return (silent, limit) if silent > limit else (still, max_wait)

    def _until_ready(self, worker: WorkerState, now: float) -> float:
        if _is_healthy(worker):
            return 0.0
        loading = LOAD_SECONDS if worker.load_seconds is None else worker.load_seconds
        return max(1.0, (loading if worker.ready else worker.starts_at + loading - now))

    def _mismatch(self, name: str, ready: Ready) -> Failed | None:
        """Return why a worker cannot exchange KV with the others, or None."""
        for other, worker in self.workers.items():
            if other == name or worker.ready is None:
                continue
            own, theirs = _kv_format(ready), _kv_format(worker.ready)
            if own != theirs:
                return Failed(f"its KV format is {own}, that of worker {other} is {theirs}", 1)
        return None


def _is_healthy(worker: WorkerState) -> bool:
    return worker.ready is not None and not worker.stuck


def _is_down(worker: WorkerState) -> bool:
    """Whether requests should not wait for a worker."""
    return worker.failure is not None or (worker.ready is None and worker.failed_starts >= GIVE_UP_STARTS)


def _kv_format(ready: Ready) -> str:
    return kv_fingerprint(ready.model.fingerprint, ready.block_size, ready.draft)
