"""A draft service's measurements, and the model of draft_service/star.py with them."""

from dataclasses import dataclass, field

from streamserve.draft_service.star import Star, TargetRound, progress
from streamserve.protocol.drafting import DraftSums

RATE = 0.1
"""Weight of the newest value in a moving mean."""
GAP = 2.0
"""Seconds. If a target's next request comes later than this, the target was not only verifying."""
PRIOR = 0.6, 20.0
"""Prior acceptance, and the number of draft tokens that it counts for."""


@dataclass
class Mean:
    """A moving mean, and the moving mean of squared distances from it."""

    value: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Update mean and variance with a value."""
        self.count += 1
        share = max(RATE, 1.0 / self.count)
        distance = value - self.value
        self.value += share * distance
        self.variance = (1.0 - share) * (self.variance + share * distance * distance)


@dataclass
class Statistics:
    """Moving means over all targets, in seconds or as counts:

    - the draft pass t_s (`batch_seconds` / `depth`), the depth d of trees, and the targets in a batch;
    - the time Z until a target's next request (`return_seconds`), and the verification t_v in it (`verify`);
    - a target's step without draft tokens (`plain`);
    - the accepted and the tested draft tokens, from which follows β.
    """

    counters: DraftSums = field(default_factory=DraftSums)
    batch_seconds: Mean = field(default_factory=Mean)
    draft: Mean = field(default_factory=Mean)
    depth: Mean = field(default_factory=Mean)
    batch: Mean = field(default_factory=Mean)
    return_seconds: Mean = field(default_factory=Mean)
    verify: Mean = field(default_factory=Mean)
    plain: Mean = field(default_factory=Mean)
    tested: float = PRIOR[1]
    accepted: float = PRIOR[0] * PRIOR[1]

    @property
    def beta(self) -> float:
        """The probability that a draft token is accepted if the draft tokens before it were."""
        return self.accepted / self.tested

    @property
    def pass_seconds(self) -> float:
        """t_s, the seconds of a draft pass."""
        return self.batch_seconds.value / self.depth.value if self.depth.value else 0.0

    @property
    def communication(self) -> float:
        """t_c, the seconds of communication, both ways."""
        return max(0.0, self.return_seconds.value - self.verify.value)

    @property
    def known(self) -> bool:
        """Whether there are enough values to predict from."""
        return self.return_seconds.count >= 8 and self.batch_seconds.count >= 8

    def star(self) -> Star:
        """Return the model with the present means, for the present mean batch size."""
        batch = max(1, round(self.batch.value))
        alone = self.draft.value if self.draft.count else self.batch_seconds.value
        return Star(max(alone, 1e-9), self.return_seconds.value, batch, max(self.batch_seconds.value, 1e-9))

    @property
    def progress(self) -> float:
        """Tokens that a target's round yields, including the token that it would yield without draft
        tokens."""
        return progress(self.beta, max(1, round(self.depth.value)))

    def round_of(self, capacity: Star, depth: float, plain: float, accepted: int, tested: int) -> TargetRound:
        """Return one target's round if batches are as `capacity` says.

        `depth` is the mean depth of its trees, `plain` the seconds of its step without draft tokens; pass 0
        for an unknown value: the overall mean is used. The target `accepted` this many of its `tested` draft
        tokens.
        """
        depth = depth or max(self.depth.value, 1.0)
        prior, count = self.beta, PRIOR[1]
        beta = (accepted + prior * count) / (tested + count)
        pass_seconds = capacity.batch_seconds / capacity.batch / max(self.depth.value, 1.0)
        return TargetRound(
            depth * pass_seconds,
            self.return_seconds.value,
            progress(min(beta, 1.0), max(1, round(depth))) * (plain or self.plain.value),
        )

    def verified(self, accepted: int, tested: int) -> None:
        """Record the verification of draft tokens by a target."""
        self.counters.accepted += accepted
        self.counters.draft_tokens += tested
        # Acceptance changes with the texts: each newly tested draft token takes 0.2 % of the weight of older
        # ones.
        fade = 0.998**tested
        self.accepted, self.tested = self.accepted * fade + accepted, self.tested * fade + tested

    def returned(self, return_seconds: float, verify: float, plain: float) -> None:
        """Record that a target's next request came `return_seconds` seconds after its trees were sent."""
        if return_seconds < GAP:
            self.return_seconds.add(return_seconds)
            self.counters.returns += 1
            self.counters.away_seconds += return_seconds
            if 0.0 < verify <= return_seconds:
                self.verify.add(verify)
        if 0.0 < plain < GAP:
            self.plain.add(plain)

    def drafted(self, targets: int, depth: int, seconds: float, read: bool) -> None:
        """Record a batch for `targets` targets that took `seconds`, with `depth` passes. If `read`, the batch
        also read long prompts: it is not used to estimate the cost of drafting."""
        counters = self.counters
        counters.batches += 1
        counters.busy += seconds
        if read or not depth:
            return
        counters.passes += depth
        counters.pass_seconds += seconds
        counters.pass_squares += seconds * seconds / depth
        self.batch_seconds.add(seconds)
        self.depth.add(depth)
        self.batch.add(targets)
        if targets == 1:
            self.draft.add(seconds)
