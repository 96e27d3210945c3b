"""When to try what is not done now: plain steps while speculation goes on, and speculation while it does not.

What is done is measured with every step. What it is compared with goes by old figures or a profile's, which
may be wrong: so it is tried at growing intervals, and at short ones again when it was not as expected.
"""

from dataclasses import dataclass

FIRST = 16
"""Steps before the first trial."""
LONGEST = 512
"""Most steps between two trials: one step in so many is what they cost at most in the long run."""
SURPRISE = 1.25
"""Factor between expected and measured seconds from which a trial is repeated soon."""


@dataclass
class Trials:
    """Trials of one alternative. `wait` steps go by before the next one, `passed` of them so far; `sequences`
    decoded at the last one."""

    first: int = FIRST
    wait: int = 0
    passed: int = 0
    sequences: int = 0

    def __post_init__(self) -> None:
        self.wait = self.first

    def due(self, sequences: int) -> bool:
        """Count a step in which so many sequences decode; whether the alternative is to be tried in it. A
        batch that is larger or smaller by more than half has not been tried."""
        if max(self.sequences, sequences) > 1.5 * min(self.sequences, sequences):
            self.wait = min(self.wait, self.first)
        self.passed += 1
        if self.passed < self.wait:
            return False
        self.passed, self.sequences, self.wait = 0, sequences, min(2 * self.wait, LONGEST)
        return True

    def found(self, expected: float, seconds: float) -> None:
        """Take in what a trial was expected to take, and took."""
        if max(expected, seconds) > SURPRISE * min(expected, seconds):
            self.wait = max(self.first, self.wait // 4)
