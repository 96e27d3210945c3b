"""The lifecycle of one supervised process, without I/O: when it counts as stuck, and when it is restarted.

    loading ── join ──▶ ready ── tick ──▶ stuck ── tick ──▶ to be killed
       ▲──────────── lose: back-off ◀───────┴──────────────────┘

Every process that ends is restarted, with bounded exponential back-off, unless its very first start failed.
A process that shows no progress is killed at once if a request waits for it, and later if it is idle.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from streamserve.fleet.events import Ending, Heartbeat
from streamserve.protocol.messages import Failed

PROGRESS_FACTOR = 5.0
"""A step may show no progress for this many times the predicted seconds of its longest part."""

MAX_GAP = 2.0
"""Seconds between two looks at the processes after which this process itself has stood still: four ticks."""

LOAD_SECONDS = 10.0
"""Expected seconds until a process is ready, until a load time has been measured."""

GIVE_UP_STARTS = 4
"""Failed starts in a row after which requests no longer wait for a process. It is still restarted."""


Ready = TypeVar("Ready")


@dataclass(frozen=True)
class SupervisionPolicy:
    """When a process counts as stuck, when it is killed, and how long its restarts wait. All times are in
    seconds."""

    stuck_after: float = 10.0
    """A ready process that shows no progress for this long counts as stuck, and is killed if it has work."""
    idle_factor: float = 3.0
    """An idle one is killed after this many times the limit at which it counts as stuck."""
    load_silence: float = 120.0
    """Silence after which a process that is loading its model is killed. Imports of large libraries let no
    other thread run."""
    immediate_restarts: int = 1
    """Restarts in a row without back-off."""
    back_off: float = 0.5
    """The first back-off, doubled by each further loss in a row."""
    max_back_off: float = 15.0
    max_misfit_back_off: float = 300.0
    """The longest back-off of a process that loaded another model than the others: each start loads it."""
    stable_seconds: float = 60.0
    """A loss counts as the first in a row if the process had been ready for this long."""

    def wait(self, losses: int, misfit: bool = False) -> float:
        """Return the seconds before a restart after `losses` earlier losses in a row; `misfit`: the process
        has loaded another model than the others."""
        further = losses - self.immediate_restarts
        longest = self.max_misfit_back_off if misfit else self.max_back_off
        return 0.0 if further < 0 else min(self.back_off * 2 ** min(further, 20), longest)


@dataclass
class Watch:
    """Tells since when this process has looked at others without a gap. While it was stopped itself, it heard
    nothing: silence counts from its return on."""

    since: float = 0.0
    _looked_at: float = field(default=-inf, repr=False)

    def look(self, now: float) -> float:
        """Record a look; return since when silence counts."""
        if now - self._looked_at > MAX_GAP:
            self.since = now
        self._looked_at = now
        return self.since


@dataclass
class ProcessState(Generic[Ready]):
    """What is known of a process whose ready message is a `Ready`.

    It starts, or started, at `starts_at`, and was ready at `ready_at`; the last one to become ready loaded in
    `load_seconds` seconds. `failed_starts` processes in a row ended before they were ready, `recent_losses`
    ones soon after. `error` is why the last one ended, as reported by the process if it had `last_words`, or
    why it was killed. `failure` is set if it could not serve at all when it was first started. A `misfit` has
    loaded another model than the others. `condemned`: how the end of one that is to be killed counts.
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
    misfit: bool = False
    condemned: Ending | None = None
    _killed_at: float = field(default=-inf, repr=False)

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
        self.failed_starts, self.error, self.misfit = 0, "", False

    def fail(self, failure: Failed, final: bool) -> None:
        """Record that it cannot serve its model; if `final`, it is not restarted."""
        self.error = self.last_words = failure.error
        self.ready, self.misfit = None, failure.misfit
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
            self.failure = Failed(self.error, 1)
            return None
        self.incarnation += 1
        wait = 0.0 if blamed else policy.wait(self.recent_losses, self.misfit)
        self.recent_losses += not blamed
        self.condemned, self._killed_at = None, -inf
        self.starts(now + wait)
        return wait

    def tick(
        self,
        beat: Heartbeat | None,
        now: float,
        policy: SupervisionPolicy,
        since: float = 0.0,
        busy: bool = False,
    ) -> bool:
        """Mark it as stuck if it is silent or hangs in a step; return whether to kill it. Silence counts from
        `since` on. An idle process may be silent for longer than one that is in a step or `busy`: requests
        wait for it."""
        quiet, limit, alive = self._quiet(beat, now, policy, since)
        self.stuck = self.ready is not None and quiet > limit
        working = busy or self.ready is None or (beat is not None and beat.in_step)
        longest = limit if working else policy.idle_factor * limit
        if quiet <= longest or now <= self.starts_at or self.failure:
            return False
        reason = _standing_still(beat, quiet, alive, self.ready is None)
        return self.condemn(reason, now, policy, "fault" if alive else "unclear")

    def condemn(self, reason: str, now: float, policy: SupervisionPolicy, ending: Ending) -> bool:
        """Record why it has to end, and how that counts; return whether to kill it now: not if it was, and
        ends slowly."""
        self.stuck, self.condemned, self.last_words = self.ready is not None, ending, reason
        kill = now - self._killed_at > policy.stuck_after
        if kill:
            self._killed_at = now
        return kill

    def until_ready(self, now: float) -> float:
        """Return the expected seconds until it is ready, 0 if it is."""
        if self.healthy:
            return 0.0
        loading = LOAD_SECONDS if self.load_seconds is None else self.load_seconds
        return max(1.0, (loading if self.ready else self.starts_at + loading - now))

    def _quiet(
        self, beat: Heartbeat | None, now: float, policy: SupervisionPolicy, since: float
    ) -> tuple[float, float, bool]:
        """Return the seconds for which it has shown no progress, the limit for them, and whether it gives
        signs of life nevertheless. Messages are progress, and so are layers and phases of a step."""
        heard = max(self.heard_at, since)
        limit = policy.stuck_after
        if self.ready is None:
            return now - max(heard, beat.at if beat else heard), max(limit, policy.load_silence), False
        if beat is None:
            return now - heard, limit, False
        still = now - max(heard, beat.moved_at)
        silent = min(still, now - max(heard, beat.at))
        if silent > limit:
            return silent, limit, False
        return still, max(limit, PROGRESS_FACTOR * beat.predicted), True


def _standing_still(beat: Heartbeat | None, seconds: float, alive: bool, loading: bool) -> str:
    """Return in words for how long a process has shown no progress."""
    if loading:
        return f"it did not respond for {seconds:.0f} s while it loaded its model"
    if alive and beat is not None and beat.phase:
        return f"its step made no progress for {seconds:.0f} s in phase {beat.phase}"
    return f"it has not responded for {seconds:.0f} s"
