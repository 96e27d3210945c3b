"""The lifecycle of one supervised process, without I/O: when it counts as stuck, and when it is restarted.

    loading ── join ──▶ ready ── tick ──▶ stuck ── tick ──▶ to be killed
       ▲──────────── lose: back-off ◀───────┴──────────────────┘

Every process that ends is restarted, with bounded exponential back-off, unless its very first start failed.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from streamserve.fleet.events import Heartbeat
from streamserve.protocol.messages import Failed

HANG_FACTOR = 10.0
"""A step counts as hung when it has made no progress for this many times its predicted seconds."""

LOAD_SECONDS = 10.0
"""Expected seconds until a process is ready, until a load time has been measured."""

GIVE_UP_STARTS = 4
"""Failed starts in a row after which requests no longer wait for a process. It is still restarted."""


Ready = TypeVar("Ready")


@dataclass(frozen=True)
class SupervisionPolicy:
    """When a process counts as stuck, when it is killed, and how long its restarts wait. All times are in
    seconds."""

    stuck_after: float = 30.0
    """A ready process that is silent for this long counts as stuck."""
    kill_factor: float = 4.0
    """It is killed after it was silent for this many times the limit at which it counts as stuck."""
    load_silence: float = 120.0
    """Silence after which a process that is loading its model is killed. Imports of large libraries let no
    other thread run."""
    immediate_restarts: int = 1
    """Restarts in a row without back-off."""
    back_off: float = 0.5
    """The first back-off, doubled by each further loss in a row."""
    max_back_off: float = 15.0
    stable_seconds: float = 60.0
    """A loss counts as the first in a row if the process had been ready for this long."""

    def wait(self, losses: int) -> float:
        """Return the seconds before a restart after `losses` earlier losses in a row."""
        further = losses - self.immediate_restarts
        return 0.0 if further < 0 else min(self.back_off * 2 ** min(further, 9), self.max_back_off)


@dataclass
class ProcessState(Generic[Ready]):
    """What is known of a process whose ready message is a `Ready`.

    It starts, or started, at `starts_at`, and was ready at `ready_at`; the last one to become ready loaded in
    `load_seconds` seconds. `failed_starts` processes in a row ended before they were ready, `recent_losses`
    ones soon after. `error` is why the last one ended, as reported by the process if it had `last_words`.
    `failure` is set if it could not serve at all when it was first started.
    """

    incarnation: int = 1
    ready: Ready | None = None
    heard_at: float = 0.0
    stuck: bool = False
    starts_at: float = 0.0
    ready_at: float = 0.0
    load_seconds: float | None = None
    failed_starts: int = 0
    recent_losses: int = 0
    error: str = ""
    last_words: str = ""
    failure: Failed | None = None

    @property
    def healthy(self) -> bool:
        """Whether it is ready and not stuck."""
        return self.ready is not None and not self.stuck

    @property
    def down(self) -> bool:
        """Whether requests should not wait for it."""
        return self.failure is not None or (self.ready is None and self.failed_starts >= GIVE_UP_STARTS)

    def starts(self, at: float) -> None:
        """Record that its process starts at a time."""
        self.heard_at = self.starts_at = at

    def hear(self, now: float) -> None:
        """Record a sign of life."""
        self.heard_at, self.stuck = now, False

    def join(self, ready: Ready, now: float) -> None:
        """Record that it has loaded its model."""
        self.ready = ready
        self.ready_at, self.load_seconds = now, max(0.0, now - self.starts_at)
        self.failed_starts, self.error = 0, ""

    def fail(self, failure: Failed, final: bool) -> None:
        """Record that it cannot serve its model; if `final`, it is not restarted."""
        self.error = self.last_words = failure.error
        self.ready = None
        if final:
            self.failure = failure

    def lose(
        self, reason: str, now: float, policy: SupervisionPolicy, final: bool, blamed: bool = False
    ) -> float | None:
        """Record the end of its process; return the seconds before its restart, or None if its first start
        failed and that is `final`. The restart has no back-off if a request is `blamed`."""
        first = self.incarnation == 1 and self.ready is None
        if self.ready is None:
            self.failed_starts += 1
        elif now - self.ready_at >= policy.stable_seconds:
            self.recent_losses = 0
        self.error, self.last_words = self.last_words or reason, ""
        self.ready, self.stuck = None, False
        if first and final:
            self.failure = Failed(reason, 1)
            return None
        self.incarnation += 1
        wait = 0.0 if blamed else policy.wait(self.recent_losses)
        self.recent_losses += not blamed
        self.starts(now + wait)
        return wait

    def tick(self, beat: Heartbeat | None, now: float, policy: SupervisionPolicy) -> bool:
        """Mark it as stuck if it is silent or hangs in a step; return whether to kill it, because it remains
        so."""
        quiet, limit = self._quiet(beat, now, policy)
        self.stuck = self.ready is not None and quiet > limit
        kill = quiet > policy.kill_factor * limit and now > self.starts_at and not self.failure
        if kill:
            self.heard_at = now
        return kill

    def until_ready(self, now: float) -> float:
        """Return the expected seconds until it is ready, 0 if it is."""
        if self.healthy:
            return 0.0
        loading = LOAD_SECONDS if self.load_seconds is None else self.load_seconds
        return max(1.0, (loading if self.ready else self.starts_at + loading - now))

    def _quiet(self, beat: Heartbeat | None, now: float, policy: SupervisionPolicy) -> tuple[float, float]:
        """Return the seconds for which it has shown no activity, and the limit for them. In a step, beats
        show that it is alive, and progress of the step shows that it does not hang."""
        limit = policy.stuck_after
        if self.ready is None:
            alive = max(self.heard_at, beat.at) if beat else self.heard_at
            return now - alive, max(limit, policy.load_silence / policy.kill_factor)
        if beat is None or not beat.phase:
            return now - self.heard_at, limit
        silent, still = now - max(self.heard_at, beat.at), now - max(self.heard_at, beat.moved_at)
        max_wait = max(limit, HANG_FACTOR * beat.predicted)
        return (silent, limit) if silent > limit else (still, max_wait)
