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
"""A step may show no progress for this many times the predicted seconds of its longest part without
progress."""

MAX_GAP = 2.0
"""If this process looks at the others after a longer gap, in seconds, it has stood still itself. Equals four
ticks."""

LOAD_SECONDS = 10.0
"""Expected seconds until a process is ready, until a load time has been measured."""

GIVE_UP_STARTS = 4
"""Failed starts in a row after which requests no longer wait for a process. It is still restarted."""


Ready = TypeVar("Ready")


@dataclass(frozen=True)
class SupervisionPolicy:
    """When a process counts as stuck, when it is killed, and how long its restarts wait. All values are in
    seconds unless they say otherwise."""

    stuck_after: float = 10.0
    """A ready process that shows no progress for this long counts as stuck, and is killed if it has work."""
    idle_factor: float = 3.0
    """An idle process is killed after this many times the limit at which it counts as stuck."""
    load_silence: float = 120.0
    """A process that is loading its model is killed after this silence. It is long, because imports of large
    libraries let no other thread run."""
    immediate_restarts: int = 1
    """Restarts in a row without back-off."""
    back_off: float = 0.5
    """The first back-off, doubled after each further loss in a row."""
    max_back_off: float = 15.0
    max_misfit_back_off: float = 300.0
    """The longest back-off of a process that loaded another model than the others: each start loads the
    model."""
    stable_seconds: float = 60.0
    """A loss counts as the first in a row if the process had been ready for this long."""

    def wait(self, losses: int, misfit: bool = False) -> float:
        """Return the seconds before a restart after `losses` earlier losses in a row. `misfit`: the process
        has loaded another model than the others."""
        further = losses - self.immediate_restarts
        longest = self.max_misfit_back_off if misfit else self.max_back_off
        return 0.0 if further < 0 else min(self.back_off * 2 ** min(further, 20), longest)


@dataclass
class Watch:
    """Tells since when this process has looked at the others without a gap. While this process was stopped it
    heard nothing, so silence of the others counts only from then on."""

    since: float = 0.0
    _looked_at: float = field(default=-inf, repr=False)

    def look(self, now: float) -> float:
        """Record a look; return the time from which on silence counts."""
        if now - self._looked_at > MAX_GAP:
            self.since = now
        self._looked_at = now
        return self.since


@dataclass
class ProcessState(Generic[Ready]):
    """The state of a process whose ready message is a `Ready`.

    - `starts_at`: when its latest start began or will begin; `ready_at`: when it became ready;
      `load_seconds`: the time between the two at its latest successful start.
    - `failed_starts`: starts in a row that ended before the process was ready.
    - `recent_losses`: losses in a row, from which the back-off follows.
    - `last_words`: why it has to end, if known before its end: as it reported, or why it is killed.
    - `error`: why its last process ended.
    - `failure`: set if it could not serve at all at its first start.
    - `misfit`: it has loaded another model than the others.
    - `condemned`: how its end counts if it is to be killed; None if it is not.
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
        """Whether the process is ready and not stuck."""
        return self.ready is not None and not self.stuck

    @property
    def down(self) -> bool:
        """Whether requests should not wait for the process."""
        return self.failure is not None or (self.ready is None and self.failed_starts >= GIVE_UP_STARTS)

    def starts(self, at: float) -> None:
        """Record that the process starts at a time."""
        self.heard_at = self.starts_at = at

    def hear(self, now: float) -> None:
        """Record a sign of life."""
        self.heard_at, self.stuck = now, False

    def join(self, ready: Ready, now: float) -> None:
        """Record that the process has loaded its model."""
        self.ready = ready
        self.ready_at, self.load_seconds = now, max(0.0, now - self.starts_at)
        self.failed_starts, self.error, self.misfit = 0, "", False

    def fail(self, failure: Failed, final: bool) -> None:
        """Record that the process cannot serve its model. If `final`, it is not restarted."""
        self.error = self.last_words = failure.error
        self.ready, self.misfit = None, failure.misfit
        if final:
            self.failure = failure

    def lose(
        self, reason: str, now: float, policy: SupervisionPolicy, final: bool, blamed: bool = False
    ) -> float | None:
        """Record the end of the process; return the seconds before its restart. If its first start failed and
        that is `final`, return None. The restart has no back-off if a request is `blamed`."""
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
        """Mark the process as stuck if it is silent or its step makes no progress; return whether to kill it.
        Silence counts from `since` on. A process that is in a step or `busy` is killed earlier than an idle
        one: requests wait for it."""
        quiet, limit, alive = self._quiet(beat, now, policy, since)
        self.stuck = self.ready is not None and quiet > limit
        working = busy or self.ready is None or (beat is not None and beat.in_step)
        longest = limit if working else policy.idle_factor * limit
        # Before a start, and after a final failure, there is no process to kill.
        if quiet <= longest or now <= self.starts_at or self.failure:
            return False
        reason = _standing_still(beat, quiet, alive, self.ready is None)
        return self.condemn(reason, now, policy, "fault" if alive else "unclear")

    def condemn(self, reason: str, now: float, policy: SupervisionPolicy, ending: Ending) -> bool:
        """Record why the process has to end, and how its end counts. Return whether to kill it now: not again
        if it was killed less than `stuck_after` seconds ago and ends slowly."""
        self.stuck, self.condemned, self.last_words = self.ready is not None, ending, reason
        kill = now - self._killed_at > policy.stuck_after
        if kill:
            self._killed_at = now
        return kill

    def until_ready(self, now: float) -> float:
        """Return the expected seconds until the process is ready; 0 if it is."""
        if self.healthy:
            return 0.0
        loading = LOAD_SECONDS if self.load_seconds is None else self.load_seconds
        return max(1.0, (loading if self.ready else self.starts_at + loading - now))

    def _quiet(
        self, beat: Heartbeat | None, now: float, policy: SupervisionPolicy, since: float
    ) -> tuple[float, float, bool]:
        """Return the seconds without progress, their limit, and whether the process still gives signs of
        life. Messages are progress, and so are the layers and phases of a step."""
        heard = max(self.heard_at, since)
        limit = policy.stuck_after
        if self.ready is None:
            return now - max(heard, beat.at if beat else heard), max(limit, policy.load_silence), False
        if beat is None:
            return now - heard, limit, False
        still = now - max(heard, beat.moved_at)
        silent = min(still, now - max(heard, beat.at))
        # Without a sign of life the process itself stands still, however long its step may take.
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
