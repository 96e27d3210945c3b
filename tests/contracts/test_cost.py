"""Costs are fitted to measurements: disturbances are smoothed, and long spans cost more for their pairs."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.cost import fit, further_pairs


def test_a_disturbed_measurement_costs_no_more_than_a_larger_step() -> None:
    curve = fit((1, 2), (0, 10), [[9.0, 1.0], [1.5, 3.0]])
    assert curve.seconds == ((1.0, 1.0), (1.5, 3.0))


@given(st.integers(1, 600), st.integers(0, 8000))
def test_pairs_are_attended_tokens_beyond_the_grid(count: int, start: int) -> None:
    attended = sum(start + number + 1 for number in range(count))
    assert further_pairs(count, start) == attended - start - count
