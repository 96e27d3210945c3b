"""The throughput guard: speculation is used only where it measured faster than plain decoding.

A policy weighs costs by a model: seconds of a step and of a draft level. The model leaves out the host's work
between steps, and steps that a device runs ahead; on a GPU these decide. So the guard measures tokens a
second between the ends of steps, with speculation and without, by the number of decoding requests.

    allowed      the policy decides           ── measured slower than plain ──▶ suppressed
    suppressed   no draft tokens, but trials  ── measured faster in a trial ──▶ allowed

A trial begins when the time that the last one lost is a small share (LOSS) of the time since.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum, auto

MEMORY = 32.0
"""Time constant of the running means, in steps."""
MIN_STEPS = 6.0
"""Weight in steps from which a mean is relied on."""
TRIAL_STEPS = 8
"""Number of steps of a trial."""
LOSS = 0.005
"""Share of the time that trials may lose."""
BIN = 1.25
"""Factor between the numbers of requests of adjacent bins."""
NEAR = 3
"""A new bin starts as a copy of the nearest bin, if that is at most this many bins away."""


class Mode(Enum):
    """How a step ran. AHEAD is a plain step that was launched before the previous step's results were known.
    It takes less time than a PLAIN step, and where steps run ahead, plain decoding consists of such steps."""

    SPECULATING = auto()
    PLAIN = auto()
    AHEAD = auto()


@dataclass
class _RecentSpeed:
    """Tokens and seconds of about MEMORY recent steps."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        self.fade(1 - 1 / MEMORY)
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + tokens, self.seconds + seconds

    def fade(self, factor: float) -> None:
        """Multiply the weight of all steps so far by `factor`."""
        self.steps, self.tokens, self.seconds = (
            self.steps * factor, self.tokens * factor, self.seconds * factor,
        )  # fmt: skip

    @property
    def known(self) -> bool:
        return self.steps >= MIN_STEPS and self.seconds > 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass
class _Bin:
    """The measurements and the verdict for similar numbers of requests. While `suppressed`, the next trial
    begins after `wait` seconds of plain decoding, of which `waited` have passed. `trial` is the number of
    steps left of a running trial, `lost` the seconds that it has lost."""

    means: dict[Mode, _RecentSpeed] = field(default_factory=lambda: {mode: _RecentSpeed() for mode in Mode})
    suppressed: bool = False
    wait: float = 0.0
    waited: float = 0.0
    trial: int = 0
    lost: float = 0.0

    @property
    def plain(self) -> _RecentSpeed:
        """The mean of plain decoding: of steps ahead if their mean is known, otherwise of plain steps."""
        ahead = self.means[Mode.AHEAD]
        return ahead if ahead.known else self.means[Mode.PLAIN]

    @property
    def slower(self) -> bool:
        """Whether speculation measured slower than plain decoding."""
        speculating, plain = self.means[Mode.SPECULATING], self.plain
        return speculating.known and plain.known and speculating.rate < plain.rate

    def observe(self, mode: Mode, tokens: int, seconds: float) -> None:
        """Record a step."""
        if mode is not Mode.SPECULATING:
            self.waited += seconds
        else:
            self.count_loss(tokens, seconds)
        self.means[mode].add(tokens, seconds)
        if not self.suppressed and mode is Mode.SPECULATING and self.slower:
            self._suppress(TRIAL_STEPS * seconds)

    def count_loss(self, tokens: int, seconds: float) -> None:
        """Add the seconds that a step of a trial lost against plain decoding."""
        if self.suppressed and self.plain.known:
            self.lost += seconds - tokens / self.plain.rate

    def _suppress(self, trial_seconds: float) -> None:
        """Suppress speculation until a trial of `trial_seconds` loses at most the share LOSS of the time."""
        speculating, plain = self.means[Mode.SPECULATING], self.plain
        expected = trial_seconds * (1 - speculating.rate / plain.rate)
        self.suppressed, self.wait = True, max(self.lost, expected) / LOSS
        self.trial, self.waited, self.lost = 0, 0.0, 0.0

    @property
    def refuses(self) -> bool:
        """Whether speculation is suppressed, and no trial runs or is due."""
        return self.suppressed and not self.trial and self.waited < self.wait

    def allows(self) -> bool:
        """Return whether the draft tokens that the policy proposes for a step may be drafted. Each call
        counts as one step of a running trial; a call may begin or end a trial."""
        if not self.suppressed:
            return True
        if self.trial:
            self.trial -= 1
            if not self.trial:
                self._end_trial()
            return not self.suppressed or self.trial > 0
        if self.refuses:
            return False
        self.trial = TRIAL_STEPS
        self.means[Mode.SPECULATING].fade(0.5)  # the trial's steps are to outweigh older ones
        return True

    def _end_trial(self) -> None:
        speculating = self.means[Mode.SPECULATING]
        if self.slower:
            self._suppress(TRIAL_STEPS * speculating.seconds / speculating.steps)
        else:
            self.suppressed, self.lost = False, 0.0


class ThroughputGuard:
    """The decision of one engine whether requests may have draft tokens."""

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self.suppressing = False
        """Whether the latest call of `allows` or `refuses` suppressed speculation."""

    def allows(self, requests: int) -> bool:
        """Return whether the draft tokens that the policy proposes for a step of `requests` decoding requests
        may be drafted. Each call counts as one step of a running trial."""
        self.suppressing = not self._bin(requests).allows()
        return not self.suppressing

    def refuses(self, requests: int) -> bool:
        """Return whether draft tokens are suppressed in a step of `requests` decoding requests, whatever the
        policy proposes. Does not count the step."""
        self.suppressing = self._bin(requests).refuses
        return self.suppressing

    def observe(self, requests: int, mode: Mode, tokens: int, seconds: float) -> None:
        """Record a step of `requests` decoding requests and nothing else. It yielded `tokens` in the
        `seconds` since the end of the step before."""
        if requests and seconds > 0:
            self._bin(requests).observe(mode, tokens, seconds)

    def count_loss(self, requests: int, tokens: int, seconds: float) -> None:
        """Count the loss of a speculating step in which the draft model first had to read much text. Its time
        says nothing of later steps, but a trial loses it all the same."""
        if requests and seconds > 0:
            self._bin(requests).count_loss(tokens, seconds)

    def _bin(self, requests: int) -> _Bin:
        """Return the bin for a number of requests. A new one starts as a copy of the nearest bin, if that is
        near enough."""
        index = round(math.log(max(requests, 1), BIN))
        if index not in self._bins:
            near = min(self._bins, key=lambda other: abs(other - index), default=None)
            copied = near is not None and abs(near - index) <= NEAR
            self._bins[index] = deepcopy(self._bins[near]) if copied and near is not None else _Bin()
        return self._bins[index]
