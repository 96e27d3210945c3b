"""A rate is what happened over the last seconds, and nothing older."""

import pytest

from streamserve.fleet.rate import Rate


def test_how_long_more_of_it_takes() -> None:
    rate = Rate(window=10.0)
    assert rate.seconds_for(0.0, 5) is None
    for second in range(5):
        rate.add(float(second), 3.0)
    assert rate.seconds_for(5.0, 30) == pytest.approx(30 / (15 / 5))


def test_what_is_old_is_forgotten() -> None:
    rate = Rate(window=10.0)
    rate.add(0.0, 1000.0)
    rate.add(9.0, 1.0)
    assert rate.seconds_for(12.0, 1) == pytest.approx(3.0)
    assert rate.seconds_for(30.0, 1) is None


def test_what_happened_all_at_once_counts_as_a_tenth_of_a_second() -> None:
    rate = Rate()
    rate.add(1.0, 10.0)
    assert rate.seconds_for(1.0, 10) == pytest.approx(0.1)
