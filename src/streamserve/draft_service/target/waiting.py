"""How long a step waits for trees that are on their way."""

from dataclasses import dataclass, field

RATE = 0.1
"""Share of the newest value in a moving mean."""
FIRST_PLAIN = 0.05
FIRST_GAIN = 2.0
"""Seconds of a step, and tokens that a tree brings, as long as nothing is known."""
LOOK_EVERY = 16
"""Steps of not waiting, as it would take too long, after which it is seen whether that is still so."""
LONGEST = 1.0
FEW, HICCUP = 4, 3.0
"""From so many values on, one counts as at most so many times the mean: some gaps hold other steps."""


@dataclass
class _Mean:
    value: float
    count: int = 0

    def add(self, value: float) -> None:
        if self.count >= FEW:
            value = min(value, HICCUP * self.value)
        self.count += 1
        self.value += max(RATE, 1.0 / self.count) * (value - self.value)


@dataclass
class Waiting:
    """A tree that brings E accepted tokens is worth waiting for as long as E plain steps take: then the
    target comes as far as it would without. What comes later than that is not waited for at all, but taken
    when it is there: drafting goes on beside the target's steps."""

    plain: _Mean = field(default_factory=lambda: _Mean(FIRST_PLAIN))
    gain: _Mean = field(default_factory=lambda: _Mean(FIRST_GAIN))
    verify: _Mean = field(default_factory=lambda: _Mean(0.0))
    _unwaited: int = 0

    def worked(self, seconds: float, trees: bool) -> None:
        """The target took so long from one look for trees to the next request, with or without any."""
        if seconds < LONGEST:
            (self.verify if trees else self.plain).add(seconds)

    def gained(self, tokens: int) -> None:
        """A tree brought so many tokens beyond the one of every step."""
        self.gain.add(float(tokens))

    @property
    def patience(self) -> float:
        """Seconds for which it pays to wait."""
        return min(self.gain.value * self.plain.value, LONGEST)

    def limit(self, usual: float) -> float:
        """Seconds to wait for answers that usually take `usual` seconds."""
        if usual <= self.patience:
            self._unwaited = 0
            return self.patience
        self._unwaited += 1
        return self.patience if self._unwaited % LOOK_EVERY == 0 else 0.0
