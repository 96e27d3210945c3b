"""A latency target requires the right number of tokens from a step."""

from math import inf, isclose

from hypothesis import given
from hypothesis import strategies as st

from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

requirements = st.builds(
    LatencyRequirement,
    tpot=st.floats(0.001, 10),
    decode_seconds=st.floats(0, 100),
    decoded=st.integers(0, 1000),
)


def test_a_request_on_target_requires_as_many_tokens_as_the_step_lasts() -> None:
    assert isclose(LatencyRequirement(tpot=0.1, decode_seconds=1.0, decoded=10).tokens(0.2), 2.0)
    assert isclose(LatencyRequirement(tpot=0.1, decode_seconds=1.5, decoded=10).tokens(0.1), 6.0)


def test_without_a_target_nothing_is_required() -> None:
    assert NO_REQUIREMENT.tokens(5.0) == -inf
    assert NO_REQUIREMENT.slack(0.0) == inf


@given(requirements, st.floats(0, 10), st.floats(0, 10))
def test_longer_steps_must_yield_more(requirement: LatencyRequirement, step: float, more: float) -> None:
    assert requirement.tokens(step + more) >= requirement.tokens(step)


@given(requirements, st.floats(0.001, 10))
def test_a_step_as_long_as_the_slack_requires_just_its_tokens(
    requirement: LatencyRequirement, step: float
) -> None:
    assert isclose(requirement.slack(requirement.tokens(step)), step, rel_tol=1e-6, abs_tol=1e-6)
