"""The throughput guard suppresses speculation that measures slower than plain decoding."""

import random

import pytest

from streamserve.speculation.guard import MIN_STEPS, TRIAL_STEPS, Mode, ThroughputGuard

PLAIN_STEP = 0.006
PLAIN_TRIAL = 9
"""Number of steps in a trial of plain decoding, which the exploration makes at intervals."""


class Engine:
    """Decodes with `requests`: a speculating step takes `cost` plain steps and yields `mean` tokens a
    request. Plain steps run ahead, `flight` of them for each decision."""

    def __init__(self, requests: int, cost: float, mean: float, flight: int = 65) -> None:
        self.guard, self.rng = ThroughputGuard(), random.Random(requests)
        self.requests, self.cost, self.mean, self.flight = requests, cost, mean, flight
        self.seconds, self.tokens, self.speculated = 0.0, 0, 0

    def plain(self, steps: int) -> None:
        for number in range(steps):
            mode = Mode.AHEAD if number and self.flight > 1 else Mode.PLAIN
            self._step(mode, PLAIN_STEP * (1.3 if mode is Mode.PLAIN and self.flight > 1 else 1.0), 1)

    def decide(self) -> None:
        """Make one decision, with a policy that always proposes draft tokens."""
        if not self.guard.allows(self.requests):
            return self.plain(self.flight)
        self.speculated += 1
        accepted = 1 + min(4.0, self.rng.expovariate(1 / (self.mean - 1))) if self.mean > 1 else 1.0
        return self._step(Mode.SPECULATING, PLAIN_STEP * self.cost, accepted)

    def _step(self, mode: Mode, seconds: float, tokens: float) -> None:
        produced = round(tokens * self.requests)
        self.guard.observe(self.requests, mode, produced, seconds)
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + produced

    @property
    def plain_ratio(self) -> float:
        """Return the tokens a second, relative to plain decoding."""
        return self.tokens / self.seconds / (self.requests / PLAIN_STEP)


def run(engine: Engine, seconds: float) -> None:
    """Make decisions for these seconds, with a trial of plain decoding after every 16 speculating steps."""
    end = engine.seconds + seconds
    while engine.seconds < end:
        engine.decide()
        if engine.speculated and engine.speculated % 16 == 0 and not engine.guard.suppressing:
            engine.plain(PLAIN_TRIAL)


@pytest.mark.parametrize("flight", [1, 65])
@pytest.mark.parametrize("requests", [1, 8, 64, 256])
@pytest.mark.parametrize("cost", [1.02, 1.5, 4.0, 12.0])
def test_speculation_that_does_not_pay_costs_less_than_two_percent(
    requests: int, cost: float, flight: int
) -> None:
    engine = Engine(requests, cost, 1.0, flight)
    run(engine, 5.0)
    engine.seconds, engine.tokens = 0.0, 0
    run(engine, 120.0)
    assert engine.plain_ratio >= 0.98


def test_speculation_that_pays_is_left_to_the_policy() -> None:
    engine = Engine(1, 1.4, 3.0)
    run(engine, 20.0)
    assert engine.plain_ratio > 1.5
    assert not engine.guard.suppressing


def test_speculation_is_used_again_when_it_pays_again() -> None:
    engine = Engine(8, 3.0, 1.5)
    run(engine, 20.0)
    assert engine.guard.suppressing
    engine.cost = 1.2
    run(engine, 60.0)
    assert not engine.guard.suppressing


def test_a_number_of_requests_that_was_not_measured_begins_like_a_near_one() -> None:
    guard = ThroughputGuard()
    for _ in range(int(2 * MIN_STEPS)):
        guard.observe(64, Mode.AHEAD, 64, 0.006)
        guard.observe(64, Mode.SPECULATING, 100, 0.02)
    assert not guard.allows(64)
    assert not guard.allows(60)
    assert not guard.allows(100)
    assert guard.allows(8), "far from 64"


def test_a_trial_has_a_fixed_number_of_steps() -> None:
    guard = ThroughputGuard()
    for _ in range(int(2 * MIN_STEPS)):
        guard.observe(2, Mode.AHEAD, 2, 0.006)
        guard.observe(2, Mode.SPECULATING, 2, 0.02)
    assert not guard.allows(2)
    guard.observe(2, Mode.PLAIN, 2, 1000.0)
    allowed = []
    for _ in range(TRIAL_STEPS + 2):
        allowed.append(guard.allows(2))
        guard.observe(2, Mode.SPECULATING, 1, 1.0)
    assert allowed == [True] * TRIAL_STEPS + [False] * 2


def test_a_refusal_is_known_without_asking_the_policy_until_a_trial_is_due() -> None:
    guard = ThroughputGuard()
    assert not guard.refuses(2)
    for _ in range(int(2 * MIN_STEPS)):
        guard.observe(2, Mode.AHEAD, 2, 0.006)
        guard.observe(2, Mode.SPECULATING, 2, 0.02)
    assert guard.refuses(2)
    assert guard.suppressing
    guard.observe(2, Mode.PLAIN, 2, 1000.0)
    for _ in range(TRIAL_STEPS):
        assert not guard.refuses(2)
        assert guard.allows(2)
        guard.observe(2, Mode.SPECULATING, 1, 1.0)
    assert not guard.allows(2)
    assert guard.refuses(2)


def test_what_a_trial_reads_first_delays_the_next_one() -> None:
    waits = []
    for read in (0.0, 10.0):
        guard = ThroughputGuard()
        for _ in range(int(2 * MIN_STEPS)):
            guard.observe(2, Mode.AHEAD, 2, 0.006)
            guard.observe(2, Mode.SPECULATING, 2, 0.02)
        guard.observe(2, Mode.PLAIN, 2, 1000.0)
        for number in range(TRIAL_STEPS + 1):
            guard.allows(2)
            if number == 0 and read:
                guard.count_loss(2, 2, read)
            else:
                guard.observe(2, Mode.SPECULATING, 2, 0.02)
        waited = 0
        while guard.refuses(2):
            guard.observe(2, Mode.AHEAD, 2, 0.006)
            waited += 1
        waits.append(waited)
    assert waits[1] > 10 * waits[0] > 0


def test_nothing_is_suppressed_before_both_are_measured() -> None:
    guard = ThroughputGuard()
    for _ in range(100):
        guard.observe(4, Mode.SPECULATING, 1, 1.0)
    assert guard.allows(4)
    guard.observe(4, Mode.PLAIN, 4, 0.001)
    assert guard.allows(4)
