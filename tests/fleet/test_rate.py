"""A rate counts only the events of the last seconds."""

import pytest

from streamserve.fleet.rate import Rate


def test_expected_seconds_follow_the_rate() -> None:
    rate = Rate(window=10.0)
    assert rate.seconds_for(0.0, 5) is None
    for second in range(5):
        rate.add(float(second), 3.0)
    assert rate.seconds_for(5.0, 30) == pytest.approx(30 / (15 / 5))


def test_old_events_are_forgotten() -> None:
    rate = Rate(window=10.0)
    rate.add(0.0, 1000.0)
    rate.add(9.0, 1.0)
    assert rate.seconds_for(12.0, 1) == pytest.approx(3.0)
    assert rate.seconds_for(30.0, 1) is None


def test_simultaneous_events_count_as_a_tenth_of_a_second() -> None:
    rate = Rate()
    rate.add(1.0, 10.0)
    assert rate.seconds_for(1.0, 10) == pytest.approx(0.1)
