"""The StarSD model of one draft service with N targets: round time, idle time, and the number of targets to
admit.

A round of one target: its request waits, is drafted for S = d·t_s seconds, and comes back Z = t_c + t_v
seconds later: communication and the target's verification. (StarSD, equations 5 to 12. The paper's progress
leaves out the token that every round yields; drafting for b targets in one pass is an extension made here.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

TOLERANCE = 1e-6
"""Tolerance for rounding in means of equal numbers."""
MAX_TARGETS = 1024
"""Upper bound of the computed numbers of targets."""


@dataclass(frozen=True)
class Star:
    """Measured means over the targets, in seconds: `draft` S, `return_seconds` Z. `batch` targets are
    drafted for at once, in `draft_batch` seconds (S_b)."""

    draft: float
    return_seconds: float
    batch: int = 1
    draft_batch: float = 0.0

    @property
    def batch_seconds(self) -> float:
        """Seconds of one batch of the service, for `batch` targets."""
        return self.draft_batch if self.batch > 1 else self.draft

    def round(self, targets: float) -> float:
        """Return the seconds from one request of a target to its next, T = max(⌈N/b⌉·S_b, S_b + Z). For b = 1
        it is N·S + max(0, Z - (N - 1)·S)."""
        return max(ceil(targets / self.batch) * self.batch_seconds, self.batch_seconds + self.return_seconds)

    def idle(self, targets: float) -> float:
        """Return the seconds of a round in which the service is idle."""
        return self.round(targets) - ceil(targets / self.batch) * self.batch_seconds

    def load(self, targets: float) -> float:
        """Return the share of the time in which the service drafts."""
        return 1.0 - self.idle(targets) / self.round(targets)

    @property
    def n_full(self) -> int:
        """N_full = ⌈Z/S⌉ + 1, the fewest targets that keep the service busy; for batches b times ⌈Z/S_b⌉,
        plus one."""
        return min(self.batch * ceil(self.return_seconds / self.batch_seconds - TOLERANCE) + 1, MAX_TARGETS)

    def n_max(self, progress: float, plain: float) -> int:
        """Return N_max: the largest number of targets with which each target is still faster than without
        draft tokens. A round yields `progress` tokens; a step without draft tokens takes `plain` seconds. At
        least 1: a target that does not gain sends no requests."""
        allowed = progress * plain
        if self.round(1) > allowed:
            return 1
        return min(self.batch * int(allowed / self.batch_seconds + TOLERANCE), MAX_TARGETS)


@dataclass(frozen=True)
class TargetRound:
    """One target's round, among targets with trees of other depths. The round takes `draft` seconds of the
    service (S_i); the target comes back after `return_seconds` (Z_i). Without draft tokens, it would take
    `allowed` seconds for the tokens of a round."""

    draft: float
    return_seconds: float
    allowed: float


def all_gain(targets: Sequence[TargetRound], batch_seconds: float) -> bool:
    """Return whether every target gains if the service drafts for all of them: a round takes max(ΣS_i, S_b +
    Z_i) seconds. Targets that do not gain even alone are not counted: they send no requests."""
    busy = sum(target.draft for target in targets)
    alone = [(batch_seconds + target.return_seconds, target) for target in targets]
    return all(max(busy, seconds) <= each.allowed for seconds, each in alone if seconds <= each.allowed)


def progress(beta: float, depth: int) -> float:
    """Return the tokens of a round, E[l] + 1, with E[l] = β(1 - β^d)/(1 - β): each draft token is accepted
    with probability `beta` if the draft tokens before it are."""
    return depth + 1.0 if beta >= 1.0 else 1.0 + beta * (1.0 - beta**depth) / (1.0 - beta)
