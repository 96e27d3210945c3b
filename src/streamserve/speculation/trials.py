"""Trials of the alternative: plain steps while speculation is in use, and speculation while it is not.

The mode in use is measured with every step. The alternative is judged by old measurements or a profile, which
may be wrong. So it is tried at growing intervals, and at short ones again after an unexpected result.
"""

from dataclasses import dataclass

FIRST = 16
"""Steps before the first trial."""
MAX_WAIT_STEPS = 512
"""Most steps between two trials: in the long run, trials take at most one step in so many."""
SURPRISE = 1.25
"""Factor between expected and measured seconds from which a trial is repeated soon."""


@dataclass
class Trials:
    """Trials of one alternative. The next one comes after `wait` steps, of which `passed` have passed;
    `sequences` decoded at the last one."""

    first: int = FIRST
    wait: int = 0
    passed: int = 0
    sequences: int = 0

    def __post_init__(self) -> None:
        self.wait = self.first

    def due(self, sequences: int) -> bool:
        """Count a step in which so many sequences decode; returns whether to try the alternative in it. A
        batch that is larger or smaller by more than half counts as not tried yet."""
        if max(self.sequences, sequences) > 1.5 * min(self.sequences, sequences):
            self.wait = min(self.wait, self.first)
        self.passed += 1
        if self.passed < self.wait:
            return False
        self.passed, self.sequences, self.wait = 0, sequences, min(2 * self.wait, MAX_WAIT_STEPS)
        return True

    def record(self, expected: float, seconds: float) -> None:
        """Record the expected and the measured seconds of a trial."""
        if max(expected, seconds) > SURPRISE * min(expected, seconds):
            self.wait = max(self.first, self.wait // 4)
