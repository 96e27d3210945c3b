"""Remeasure a profile while serving, in pieces of one short step each.

A piece is a step of a few query tokens without context, so an arriving request waits for one piece at most.
Longer steps are corrected by the factor of the longest measured one, steps with context by the factor of the
same step without context.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import torch

from streamserve.contracts.cost import StepCost, fit
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.lock import BackgroundLoad, exclusive_measurement
from streamserve.execution.profile.measure import MAX_DISAGREEMENT, Series, rounds_agree, seconds_of
from streamserve.execution.profile.profile import Profile, ProfileStore
from streamserve.execution.profile.steps import Steps, grid_points

PIECE_SECONDS = 0.005
"""Maximum seconds of a piece, predicted by the profile. A step of one query token is always a piece."""

ROUNDS = 4
"""Number of rounds over all pieces; the first one only warms up."""


@dataclass
class Remeasurement:
    """A remeasurement of the profile `old`, piece by piece. `disturbed`: another process measured at the same
    time."""

    loaded: Loaded
    store: ProfileStore
    old: Profile
    disturbed: bool = False
    _series: dict[int, Series] = field(default_factory=dict)
    _done: int = 0

    def __post_init__(self) -> None:
        (points,) = zip(
            *grid_points(self.old.cost.tokens, (), self.loaded.engine_config, 1 << 20), strict=True
        )
        short = [
            point
            for point in points
            if point.query_tokens == 1 or self.old.cost(point.query_tokens) <= PIECE_SECONDS
        ]
        self._steps = Steps(self.loaded, short)
        self._series = {
            point.query_tokens: Series(self._steps.call(point), point.query_tokens) for point in short
        }
        self._background_load = BackgroundLoad(self.old.subject.machine.threads)

    @torch.inference_mode()
    def piece(self) -> bool:
        """Measure one piece, unless another process is measuring; returns whether it was the last one."""
        with exclusive_measurement(self.store.folder, 0.0) as exclusive:
            if not exclusive:
                self.disturbed = True
                return False
            numbers = list(self._series)
            series = self._series[numbers[self._done % len(numbers)]]
            seconds = seconds_of(series.call, minimum=0.0)
            if self._done >= len(numbers):
                series.seconds.append(seconds)
            self._done += 1
        return self._done >= ROUNDS * len(numbers)

    def profile(self) -> Profile:
        """Return the remeasured profile. It is stable if the rounds agree and no other process measured or
        computed meanwhile."""
        stable = rounds_agree(self._series.values()) and not (
            self.disturbed or self._background_load.disturbs
        )
        factors = {tokens: series.median / self.old.cost(tokens) for tokens, series in self._series.items()}
        return msgspec.structs.replace(
            self.old,
            cost=_corrected(self.old.cost, factors),
            stable=stable,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def contradicts(profile: Profile, other: Profile) -> bool:
    """Return whether two profiles differ by more than MAX_DISAGREEMENT at some number of query tokens."""
    ratios = [other.cost(tokens) / profile.cost(tokens) for tokens in profile.cost.tokens]
    return max(*ratios, *(1 / ratio for ratio in ratios)) > 1 + MAX_DISAGREEMENT


def _corrected(cost: StepCost, factors: dict[int, float]) -> StepCost:
    """Return the curve with each line multiplied by its factor. A line that was not measured gets the factor
    of the longest measured line below it."""
    measured = [tokens for tokens in cost.tokens if tokens in factors]
    lines = []
    for tokens, line in zip(cost.tokens, cost.seconds, strict=True):
        factor = factors[max((count for count in measured if count <= tokens), default=measured[0])]
        lines.append([factor * seconds for seconds in line])
    curve = fit(cost.tokens, cost.kv_bytes, lines, cost.token_seconds, cost.byte_seconds)
    return msgspec.structs.replace(curve, pair_seconds=cost.pair_seconds)
