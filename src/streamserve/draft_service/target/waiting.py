"""How long a step waits for trees in flight."""

from dataclasses import dataclass, field

RATE = 0.1
"""Weight of the newest value in a moving mean."""
INITIAL_PLAIN_SECONDS = 0.05
INITIAL_GAIN = 2.0
"""Initial seconds of a step without trees, and initial accepted tokens of a tree."""
RETRY_STEPS = 16
"""Steps without waiting, because the service was too slow, after which waiting is tried once."""
LONGEST = 1.0
MIN_SAMPLES, OUTLIER_FACTOR = 4, 3.0
"""After MIN_SAMPLES values, a value is capped at OUTLIER_FACTOR times the mean: some intervals contain other
steps."""


@dataclass
class _Mean:
    value: float
    count: int = 0

    def add(self, value: float) -> None:
        if self.count >= MIN_SAMPLES:
            value = min(value, OUTLIER_FACTOR * self.value)
        self.count += 1
        self.value += max(RATE, 1.0 / self.count) * (value - self.value)


@dataclass
class Waiting:
    """How long a step waits for trees. Waiting for a tree that yields E accepted tokens pays for as long as E
    plain steps take: in this time, the target would make the same progress without it. Trees of services that
    usually take longer are used when they arrive: drafting then overlaps with the target's steps."""

    plain: _Mean = field(default_factory=lambda: _Mean(INITIAL_PLAIN_SECONDS))
    gain: _Mean = field(default_factory=lambda: _Mean(INITIAL_GAIN))
    verify: _Mean = field(default_factory=lambda: _Mean(0.0))
    _skipped_waits: dict[int, int] = field(default_factory=dict)
    """Steps in a row without waiting, by service."""

    def worked(self, seconds: float, trees: bool) -> None:
        """Record the seconds from one collection of trees to the next request, with or without trees."""
        if seconds < LONGEST:
            (self.verify if trees else self.plain).add(seconds)

    def gained(self, tokens: int) -> None:
        """Record the accepted tokens of a tree, without the token that every step yields."""
        self.gain.add(float(tokens))

    @property
    def max_wait(self) -> float:
        """The number of seconds for which waiting for a tree pays."""
        return min(self.gain.value * self.plain.value, LONGEST)

    def limit(self, service: int, usual: float) -> float:
        """Return the seconds to wait for answers of a service that usually take `usual` seconds."""
        if usual <= self.max_wait:
            self._skipped_waits[service] = 0
            return self.max_wait
        skipped = self._skipped_waits.get(service, 0) + 1
        self._skipped_waits[service] = skipped
        return self.max_wait if skipped % RETRY_STEPS == 0 else 0.0
