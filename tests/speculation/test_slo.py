"""What a latency target asks of a step."""

from math import inf, isclose

from hypothesis import given
from hypothesis import strategies as st

from streamserve.speculation.slo import NO_NEED, Need

needs = st.builds(
    Need, tpot=st.floats(0.001, 10), decode_seconds=st.floats(0, 100), decoded=st.integers(0, 1000)
)


def test_who_is_on_target_needs_as_many_tokens_as_the_step_lasts() -> None:
    assert isclose(Need(tpot=0.1, decode_seconds=1.0, decoded=10).tokens(0.2), 2.0)
    assert isclose(Need(tpot=0.1, decode_seconds=1.5, decoded=10).tokens(0.1), 6.0)


def test_without_a_target_nothing_is_needed() -> None:
    assert NO_NEED.tokens(5.0) == -inf
    assert NO_NEED.slack(0.0) == inf


@given(needs, st.floats(0, 10), st.floats(0, 10))
def test_longer_steps_must_bring_more(need: Need, step: float, more: float) -> None:
    assert need.tokens(step + more) >= need.tokens(step)


@given(needs, st.floats(0.001, 10))
def test_a_step_as_long_as_the_slack_needs_just_its_tokens(need: Need, step: float) -> None:
    assert isclose(need.slack(need.tokens(step)), step, rel_tol=1e-6, abs_tol=1e-6)
