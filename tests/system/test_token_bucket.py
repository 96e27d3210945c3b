"""A token bucket never allows more than its burst and its rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.system.token_bucket import TokenBucket


@given(
    rate=st.floats(0.1, 100.0),
    burst=st.floats(1.0, 100.0),
    calls=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 50.0)), max_size=30),
)
def test_at_most_the_burst_and_the_rate_are_spent(
    rate: float, burst: float, calls: list[tuple[float, float]]
) -> None:
    bucket, now, spent = TokenBucket(rate, burst), 0.0, 0.0
    for pause, amount in calls:
        now += pause
        if bucket.spend(amount, now):
            spent += amount
        assert spent <= burst + rate * now + 1e-6


def test_after_the_time_to_wait_the_amount_is_available() -> None:
    bucket = TokenBucket(rate=2.0, burst=10.0)
    assert bucket.spend(10.0, 0.0)
    assert not bucket.spend(4.0, 1.0)
    assert bucket.wait(4.0, 1.0) == pytest.approx(1.0)
    assert bucket.spend(4.0, 2.0)
    assert bucket.wait(100.0, 2.0) == pytest.approx(5.0), "more than the burst waits for a full bucket"
