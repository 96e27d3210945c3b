"""Remeasure a profile while serving, in pieces.

A piece is a short step of a few query tokens without context, a copy of a few blocks, or a read of a part of
memory, so an arriving request waits for two short steps at most. Steps that are too long for a piece are not
measured again: their old seconds are multiplied by the ratio of new to old seconds of a measured step. For
longer steps it is the longest measured one, for steps with context the same step without context.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import torch

from streamserve.contracts.cost import fit
from streamserve.contracts.plan import Span
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.floor import step_floor
from streamserve.execution.profile.lock import BackgroundLoad, exclusive_measurement
from streamserve.execution.profile.measure import (
    MAX_DISAGREEMENT,
    QUICK,
    Series,
    SwapCopies,
    rate_of_multipliers,
    read_bytes,
    reader,
    rounds_agree,
    seconds_of,
)
from streamserve.execution.profile.profile import Profile, ProfileStore
from streamserve.execution.profile.steps import Point, Steps, grid_points, spans_of
from streamserve.protocol.cost_curve import CostCurve

PIECE_SECONDS = 0.005
"""Steps that take longer are no pieces. A step of one query token is always a piece."""

PIECE_KV_BYTES = 64 << 20
"""Maximum memory for the KV of a piece."""

PIECE_READ_BYTES = 16 << 20
"""Maximum bytes that a piece reads of the memory whose bandwidth is measured."""

ROUNDS = 4
"""Number of rounds over all pieces; the first one only warms up."""


@dataclass
class Remeasurement:
    """A remeasurement of the profile `old`, piece by piece. `disturbed`: another process measured at the same
    time. `pieces`: number of pieces measured so far."""

    loaded: Loaded
    store: ProfileStore
    old: Profile
    disturbed: bool = False
    pieces: int = 0
    _series: list[Series] = field(default_factory=list)
    _next: int = 0
    _round: int = 0

    def __post_init__(self) -> None:
        limits = self.loaded.engine_config
        max_blocks = PIECE_KV_BYTES // (self.old.kv_token_bytes * limits.block_size)
        tokens = sorted({*self.old.cost.tokens, *QUICK.query_tokens})
        points = [line[0] for line in grid_points(tokens, (), limits, max_blocks)]
        steps = Steps(self.loaded, points)
        self._steps = {point.query_tokens: Series(steps.call(point), point.query_tokens) for point in points}
        self._work = step_floor(self.loaded, 1.0, 1.0)
        size = read_bytes(self._work)
        parts = -(-size // PIECE_READ_BYTES)
        self._read, self._read_bytes = Series(reader(self.loaded.pool, size, parts), -1), size / parts
        self._swaps = SwapCopies(steps, self.old.kv_token_bytes * limits.block_size)
        self._series = [self._read, *self._swaps.series, *self._steps.values()]
        self._background_load = BackgroundLoad(self.old.subject.machine.threads)

    @torch.inference_mode()
    def piece(self) -> bool:
        """Measure one piece, unless another process is measuring; returns whether it was the last one."""
        with exclusive_measurement(self.store.folder, 0.0) as exclusive:
            if not exclusive:
                self.disturbed = True
                return False
            series = self._series[self._next]
            if not self._round:
                series.call()
            seconds = seconds_of(series.call, minimum=0.0)
        if self._round:
            series.seconds.append(seconds)
        elif seconds > PIECE_SECONDS and series.rank > 1:
            del self._series[self._next :]  # the steps that follow are longer
        self.pieces += 1
        self._next += 1
        if self._next >= len(self._series):
            self._next, self._round = 0, self._round + 1
        return self._round == ROUNDS

    def profile(self) -> Profile:
        """Return the remeasured profile. It is stable if the rounds agree and no other process measured or
        computed meanwhile."""
        old, measured = self.old, [series for series in self._steps.values() if series.seconds]
        stable = rounds_agree(measured) and not (self.disturbed or self._background_load.disturbs)
        curve = _corrected(old.cost, {int(series.rank): series.median for series in measured})
        points = [
            [
                (_point(tokens, kv_bytes // old.kv_token_bytes, self.loaded), seconds)
                for kv_bytes, seconds in zip(curve.kv_bytes, line, strict=True)
            ]
            for tokens, line in zip(curve.tokens, curve.seconds, strict=True)
        ]
        bandwidth, matrix_rate = self._rates([entry for line in points for entry in line])
        multipliers = max(old.multiplier_rate, rate_of_multipliers(self.loaded))
        floor = step_floor(self.loaded, bandwidth, max(matrix_rate, multipliers))
        return msgspec.structs.replace(
            old,
            cost=msgspec.structs.replace(
                curve,
                token_seconds=2 * self._work.token_parameters / matrix_rate,
                byte_seconds=1 / bandwidth,
                pair_seconds=old.cost.pair_seconds,
            ),
            swap=self._swaps.cost(),
            bandwidth=bandwidth,
            matrix_rate=matrix_rate,
            multiplier_rate=multipliers,
            floor=tuple(tuple(floor.of_spans(self._spans(point)) for point, _ in line) for line in points),
            stable=stable,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _rates(self, points: list[tuple[Point, float]]) -> tuple[float, float]:
        """Return the bandwidth and the matrix rate: the highest of all that were observed, since other
        processes only make a measurement lower, and no lower than the seconds of any step imply."""
        bandwidths = [self.old.bandwidth, self._read_bytes / self._read.median]
        rates = [self.old.matrix_rate]
        for point, seconds in points:
            work = self._work.work(self._spans(point))
            rates.append(work.operations / seconds)
            if self.loaded.model.spec.experts is None:  # the bytes of experts are not known exactly
                bandwidths.append(work.bytes / seconds)
        return max(bandwidths), max(rates)

    def _spans(self, point: Point) -> list[Span]:
        return spans_of(point, 0, self.loaded.engine_config.block_size, self.loaded.model.spec.vocab_size)


def contradicts(profile: Profile, other: Profile) -> bool:
    """Return whether two profiles differ by more than MAX_DISAGREEMENT at some number of query tokens."""
    ratios = [other.cost(tokens) / profile.cost(tokens) for tokens in profile.cost.tokens]
    return max(*ratios, *(1 / ratio for ratio in ratios)) > 1 + MAX_DISAGREEMENT


def _point(tokens: int, context: int, loaded: Loaded) -> Point:
    return Point(tokens, context, min(tokens, loaded.engine_config.max_num_seqs))


def _corrected(cost: CostCurve, measured: dict[int, float]) -> CostCurve:
    """Return the curve through the `measured` seconds by query tokens. Its lines are the measured ones and
    the other lines of `cost`. A line that was not measured is multiplied by the factor of the longest
    measured line below it, or of the shortest one."""
    factors = {tokens: seconds / cost(tokens) for tokens, seconds in measured.items()}
    tokens = sorted({*cost.tokens, *measured})
    lines = []
    for count in tokens:
        factor = factors[max((known for known in measured if known <= count), default=min(measured))]
        lines.append([factor * cost(count, kv_bytes) for kv_bytes in cost.kv_bytes])
    return fit(tokens, cost.kv_bytes, lines)
