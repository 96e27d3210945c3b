"""One draft model for N targets, by the formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.star import Star, progress, round_of_different

seconds = st.floats(1e-4, 1.0)


@given(seconds, seconds, st.integers(1, 50))
def test_one_at_a_time_it_is_the_papers_formula(draft, back, targets):
    star = Star(draft, back)
    idle = max(0.0, back - (targets - 1) * draft)
    assert star.round(targets) == pytest.approx(targets * draft + idle)
    assert star.idle(targets) == pytest.approx(idle, abs=1e-12)


@given(seconds, seconds, st.integers(1, 8), st.floats(1.0, 3.0))
def test_n_full_is_the_fewest_that_leave_no_idle_time(draft, back, batch, stretch):
    star = Star(draft, back, batch, draft * stretch)
    full = star.full
    if full < 1000:
        assert star.idle(full) == pytest.approx(0.0, abs=1e-5)
        if full > 1:
            assert star.idle(full - 1) > -1e-9
            assert star.round(full - 1) >= star.turn + star.back - 1e-9


def test_the_papers_example():
    star = Star(0.01, 0.04)
    assert star.full == 5
    assert star.load(1) == pytest.approx(0.2)
    assert star.load(5) == pytest.approx(1.0)
    assert 5 * star.round(1) / star.round(5) == pytest.approx(5.0)


@given(seconds, seconds, st.floats(0.0, 0.99), st.integers(1, 8), seconds)
def test_up_to_n_max_each_gains_and_beyond_it_none_would(draft, back, beta, depth, plain):
    star, tokens = Star(draft, back), progress(beta, depth)
    most = star.most(tokens, plain)
    if star.round(1) <= tokens * plain:
        if most < 1000:
            assert tokens / star.round(most) >= 1 / plain * (1 - 1e-6)
            assert tokens / star.round(most + 1) < 1 / plain * (1 + 1e-6)
    else:
        assert most == 1


@given(st.floats(0.0, 1.0), st.integers(1, 20))
def test_progress_counts_the_token_of_every_round(beta, depth):
    expected = 1.0 + sum(beta**level for level in range(1, depth + 1))
    assert progress(beta, depth) == pytest.approx(expected)


def test_different_targets_add_up():
    assert round_of_different([0.01, 0.02, 0.03], 0.01) == pytest.approx(0.06)
    assert round_of_different([0.01, 0.02], 0.1) == pytest.approx(0.12)
