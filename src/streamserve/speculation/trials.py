"""Trials of the mode not in use: plain steps while speculation is in use, and speculation while it is not.

Every step measures the mode in use. The other mode is judged by old measurements or a profile, which may be
wrong. So it is tried at growing intervals, and soon again after an unexpected result.
"""

from dataclasses import dataclass

FIRST = 16
"""Steps before the first trial."""
MAX_WAIT_STEPS = 512
"""Maximum steps between two trials. In the long run, one step in this many is a trial."""
SURPRISE = 1.25
"""Factor between expected and measured seconds above which a trial is repeated soon."""


@dataclass
class Trials:
    """When to try one mode. The next trial comes after `wait` steps, of which `passed` have passed.
    `sequences` is the number of decoding sequences at the last trial."""

    first: int = FIRST
    wait: int = 0
    passed: int = 0
    sequences: int = 0

    def __post_init__(self) -> None:
        self.wait = self.first

    def due(self, sequences: int) -> bool:
        """Count a step with `sequences` decoding sequences; returns whether the step is a trial. A batch size
        counts as not tried yet if it differs from the last trial's by more than a factor of 1.5."""
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
