"""One draft model for N targets: how long a round takes, when the service is never idle, whom to admit.

A round of one target: its request waits, is drafted for S = d·t_s seconds, and comes back Z = t_c + t_v
seconds later: communication and the target's verification. (StarSD, equations 5 to 12. Theirs leaves out of
the progress the token that every round yields; drafting for b targets in one pass is ours.)
"""

from dataclasses import dataclass
from math import ceil

HAIR = 1e-6
"""What means of equal numbers may differ by."""
MOST_TARGETS = 1024
"""Where counting targets ends."""


@dataclass(frozen=True)
class Star:
    """What was measured, as means over the targets, in seconds: `draft` S, `back` Z. `batch` targets are
    drafted for at once, in `draft_batch` seconds (S_b)."""

    draft: float
    back: float
    batch: int = 1
    draft_batch: float = 0.0

    @property
    def turn(self) -> float:
        """Seconds of one pass of the service over `batch` targets."""
        return self.draft_batch if self.batch > 1 else self.draft

    def round(self, targets: float) -> float:
        """Seconds from one request of a target to its next, T = max(⌈N/b⌉·S_b, S_b + Z): for b = 1 it is
        N·S + max(0, Z - (N - 1)·S)."""
        return max(ceil(targets / self.batch) * self.turn, self.turn + self.back)

    def idle(self, targets: float) -> float:
        """Seconds of a round in which the service has nothing to do."""
        return self.round(targets) - ceil(targets / self.batch) * self.turn

    def load(self, targets: float) -> float:
        """The share of its time that the service drafts."""
        return 1.0 - self.idle(targets) / self.round(targets)

    @property
    def full(self) -> int:
        """N_full = ⌈Z/S⌉ + 1, the fewest targets that keep the service busy; for batches b times ⌈Z/S_b⌉,
        and one more."""
        return min(self.batch * ceil(self.back / self.turn - HAIR) + 1, MOST_TARGETS)

    def most(self, progress: float, plain: float) -> int:
        """N_max: most targets for which each, with `progress` tokens a round, still beats a step of its own
        without guesses, of `plain` seconds. At least one: who does not gain does not ask."""
        allowed = progress * plain
        if self.round(1) > allowed:
            return 1
        return min(self.batch * int(allowed / self.turn + HAIR), MOST_TARGETS)


def progress(beta: float, depth: int) -> float:
    """Tokens of a round, E[l] + 1, with E[l] = β(1 - β^d)/(1 - β): each guess is accepted with probability
    `beta` if those before it are."""
    return depth + 1.0 if beta >= 1.0 else 1.0 + beta * (1.0 - beta**depth) / (1.0 - beta)


def round_of_different(drafts: list[float], back: float) -> float:
    """Seconds of a round of targets whose drafts take differently long, ΣS_i, one at a time."""
    return max(sum(drafts), max(drafts) + back)
