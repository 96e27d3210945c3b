"""A target's measurements of one draft service: answer time, seconds by batch size, reading, acceptance."""

from dataclasses import dataclass, field

from streamserve.protocol.drafting import Drafts, Pong

RATE = 0.2
"""Weight of the newest value in a moving mean."""
MIN_SAMPLES, OUTLIER_FACTOR = 4, 3.0
"""After MIN_SAMPLES values, a value is capped at OUTLIER_FACTOR times the mean."""
MIN_VARIANCE = 0.25
"""The cost of one more tree is computed once the number of trees in a batch has at least this variance."""
ASSUMED_SHARE = 0.5
"""Share of a batch's seconds that is assumed to grow with its trees, until the cost of a tree is measured."""
RECENT_SECONDS = 3.0
"""Seconds for which a target's measured batches count. Later, the batch time that the service reports
counts."""
READ_TOKENS = 32
"""If a delta has at least this many tokens, its batch measures reading instead of drafting."""
HALF_LIFE_SECONDS = 60.0
MAX_TREES = 64.0
"""Earlier trees count half after HALF_LIFE_SECONDS, and again after each MAX_TREES trees."""


@dataclass(frozen=True)
class BatchTimes:
    """A batch with `trees` trees of one target: its seconds, and the seconds that each further tree takes."""

    trees: float = 1.0
    seconds: float = 0.0
    per_tree: float = 0.0


@dataclass
class BatchSeconds:
    """Moving means of a batch: this target's trees in it, its seconds, and the seconds per further tree."""

    count: int = 0
    trees: float = 1.0
    seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def add(self, trees: int, seconds: float) -> None:
        """Record a batch with `trees` trees of this target."""
        if self.count >= MIN_SAMPLES:
            seconds = min(seconds, OUTLIER_FACTOR * self.seconds)
        self.count += 1
        share = max(RATE, 1.0 / self.count)
        more_trees, more_seconds = trees - self.trees, seconds - self.seconds
        self.trees += share * more_trees
        self.seconds += share * more_seconds
        if self.count > 1:
            self._variance = (1.0 - share) * (self._variance + share * more_trees * more_trees)
            self._covariance = (1.0 - share) * (self._covariance + share * more_trees * more_seconds)

    @property
    def per_tree(self) -> float:
        """The seconds that one more tree in a batch takes. At least 0, at most the mean seconds per tree."""
        proportional = self.seconds / max(self.trees, 1.0)
        if self._variance < MIN_VARIANCE:
            return ASSUMED_SHARE * proportional
        return min(max(self._covariance / self._variance, 0.0), proportional)


@dataclass
class AcceptanceRate:
    """Accepted draft tokens of a number of trees; older ones count less."""

    trees: float = 0.0
    accepted: float = 0.0
    _at: float = 0.0

    def add(self, accepted: int, now: float) -> None:
        """Record a verified tree."""
        self.trees, self.accepted = self.at(now)
        self._at = now
        if self.trees >= MAX_TREES:
            self.trees, self.accepted = 0.5 * self.trees, 0.5 * self.accepted
        self.trees += 1.0
        self.accepted += accepted

    def at(self, now: float) -> tuple[float, float]:
        """Return how many trees count now, and their accepted tokens."""
        fade = 0.5 ** (max(now - self._at, 0.0) / HALF_LIFE_SECONDS)
        return fade * self.trees, fade * self.accepted

    def clear(self) -> None:
        """Forget all measurements: the service has another draft model now."""
        self.trees = self.accepted = 0.0


@dataclass
class AnswerTimes:
    """Estimates for one service, in seconds:

    - `usual`: the usual time from a request to its answer; `round_trip`: the network's part of this time.
    - `queue`: the time of the queued work, and `reported`: the time of a batch, both as the service reports
      them.
    - `read`: the time to read one token of a prompt; 0 if unknown.
    """

    usual: float = 0.0
    round_trip: float = 0.0
    queue: float = 0.0
    reported: float = 0.0
    read: float = 0.0
    answers: int = 0
    batch: BatchSeconds = field(default_factory=BatchSeconds)
    _batch_at: float = float("-inf")

    def answered(self, seconds: float, drafts: Drafts) -> None:
        """Record that a tree arrived `seconds` after its request."""
        self.usual = seconds if not self.answers else self.usual + RATE * (seconds - self.usual)
        self.answers += 1
        self.queue = drafts.queue
        self._moved(seconds - drafts.waited - drafts.seconds)

    def drafted(self, drafts: Drafts, tokens: int, now: float) -> None:
        """Record a batch: `drafts` are this target's trees in it, and no request for one of them sent more
        than `tokens` tokens. A message that repeats an answer has no seconds and is ignored."""
        if not drafts.seconds:
            return
        if tokens < READ_TOKENS:
            self.batch.add(len(drafts.drafts), drafts.seconds)
            self._batch_at = now
            return
        # The batches that read a long prompt's first chunks count as waiting of its tree: they are added
        # here.
        seconds = max(drafts.waited + drafts.seconds - self.batch.seconds, 0.0) / tokens
        self.read = seconds if not self.read else self.read + RATE * (seconds - self.read)

    def ponged(self, pong: Pong, now: float) -> None:
        """Record the answer to a Ping."""
        self.queue, self.reported = pong.queue, pong.seconds
        self._moved(now - pong.sent)

    def batch_now(self, now: float) -> BatchTimes:
        """Return the present estimate for a batch; its seconds are 0 if unknown."""
        if self.batch.count and (now - self._batch_at < RECENT_SECONDS or not self.reported):
            return BatchTimes(self.batch.trees, self.batch.seconds, self.batch.per_tree)
        per_tree = self.batch.per_tree if self.batch.count else ASSUMED_SHARE * self.reported
        return BatchTimes(1.0, self.reported, per_tree)

    def _moved(self, seconds: float) -> None:
        """Update the minimum of recent round trips. A minimum, because most answers are noticed late: they
        are read only between steps."""
        seconds = max(seconds, 0.0)
        self.round_trip = seconds if not self.round_trip else min(seconds, 1.05 * self.round_trip)
