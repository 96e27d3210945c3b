"""The formulas of one draft model for N targets have the values that the paper defines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.star import Star, TargetRound, all_gain, progress

seconds = st.floats(1e-4, 1.0)


@given(seconds, seconds, st.integers(1, 50))
def test_without_batches_it_is_the_papers_formula(draft, return_seconds, targets):
    star = Star(draft, return_seconds)
    idle = max(0.0, return_seconds - (targets - 1) * draft)
    assert star.round(targets) == pytest.approx(targets * draft + idle)
    assert star.idle(targets) == pytest.approx(idle, abs=1e-12)


@given(seconds, seconds, st.integers(1, 8), st.floats(1.0, 3.0))
def test_n_full_is_the_fewest_that_leave_no_idle_time(draft, return_seconds, batch, stretch):
    star = Star(draft, return_seconds, batch, draft * stretch)
    n_full = star.n_full
    if n_full < 1000:
        assert star.idle(n_full) == pytest.approx(0.0, abs=1e-5)
        if n_full > 1:
            assert star.idle(n_full - 1) > -1e-9
            assert star.round(n_full - 1) >= star.batch_seconds + star.return_seconds - 1e-9


def test_the_papers_example():
    star = Star(0.01, 0.04)
    assert star.n_full == 5
    assert star.load(1) == pytest.approx(0.2)
    assert star.load(5) == pytest.approx(1.0)
    assert 5 * star.round(1) / star.round(5) == pytest.approx(5.0)


@given(seconds, seconds, st.floats(0.0, 0.99), st.integers(1, 8), seconds)
def test_up_to_n_max_each_gains_and_beyond_it_none(draft, return_seconds, beta, depth, plain):
    star, tokens = Star(draft, return_seconds), progress(beta, depth)
    n_max = star.n_max(tokens, plain)
    if star.round(1) <= tokens * plain:
        if n_max < 1000:
            assert tokens / star.round(n_max) >= 1 / plain * (1 - 1e-6)
            assert tokens / star.round(n_max + 1) < 1 / plain * (1 + 1e-6)
    else:
        assert n_max == 1


@given(st.floats(0.0, 1.0), st.integers(1, 20))
def test_progress_counts_the_token_of_every_round(beta, depth):
    expected = 1.0 + sum(beta**level for level in range(1, depth + 1))
    assert progress(beta, depth) == pytest.approx(expected)


def test_targets_of_other_depths_count_by_what_they_take_of_a_round():
    shallow, deep = TargetRound(0.003, 0.001, 0.01), TargetRound(0.006, 0.001, 0.02)
    assert all_gain([shallow] * 3, 0.003)
    assert not all_gain([shallow] * 4, 0.003), "a round takes 12 ms, plain decoding 10 ms"
    assert all_gain([shallow, deep], 0.003)
    assert not all_gain([shallow, shallow, deep], 0.003), "targets with shallow trees would be slower"
    assert all_gain([deep] * 3, 0.006)
    slow = TargetRound(0.001, 0.05, 0.01)
    assert all_gain([shallow, slow], 0.003), "a target that does not gain even alone is not counted"


def test_a_targets_round_is_of_its_own_depth_acceptance_and_steps():
    statistics = Statistics()
    for _ in range(20):
        statistics.drafted(targets=1, depth=4, seconds=0.004, read=False)
        statistics.returned(0.01, 0.008, 0.02)
    capacity = Star(0.004, 0.01)
    unknown = statistics.round_of(capacity, 0.0, 0.0, 0, 0)
    assert unknown.draft == pytest.approx(0.004)
    assert unknown.allowed == pytest.approx(progress(0.6, 4) * 0.02)
    deep = statistics.round_of(capacity, 8.0, 0.05, 900, 1000)
    assert deep.draft == pytest.approx(0.008)
    assert deep.allowed == pytest.approx(progress(912 / 1020, 8) * 0.05)
