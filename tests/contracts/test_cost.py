"""Cost curves are exact at measured points, never decrease, and are plausible beyond the measurements."""

from itertools import accumulate, pairwise
from math import inf, isclose, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.cost import StepCost, fit, further_pairs

ROUNDING = 1e-9
"""Relative rounding error that comparisons of interpolated costs must allow."""

axes = st.lists(st.integers(1, 2000), min_size=1, max_size=6).map(lambda gaps: tuple(accumulate(gaps)))


@st.composite
def curves(draw: st.DrawFn) -> StepCost:
    """Return a curve fitted to measurements that may fall, as noisy ones do."""
    tokens, kv_bytes = draw(axes), (0, *draw(axes))
    row = st.lists(st.floats(1e-5, 10), min_size=len(kv_bytes), max_size=len(kv_bytes))
    grid = draw(st.lists(row, min_size=len(tokens), max_size=len(tokens)))
    slope = st.floats(0, 1e-3)
    return msgspec.structs.replace(
        fit(tokens, kv_bytes, grid, draw(slope), draw(slope)), pair_seconds=draw(slope)
    )


token_counts, bytes_held = st.integers(0, 20_000), st.integers(0, 50_000)


@given(curves())
def test_a_curve_is_exact_at_its_grid_points(curve: StepCost) -> None:
    for i, tokens in enumerate(curve.tokens):
        for j, kv_bytes in enumerate(curve.kv_bytes):
            assert curve(tokens, kv_bytes) == curve.seconds[i][j]


@given(curves(), token_counts, token_counts, bytes_held, bytes_held)
def test_more_tokens_or_more_kv_never_cost_less(curve: StepCost, a: int, b: int, c: int, d: int) -> None:
    less, more = curve(min(a, b), min(c, d)), curve(max(a, b), max(c, d))
    assert 0 <= less <= more * (1 + ROUNDING)


@given(curves(), token_counts, bytes_held)
def test_curves_are_continuous(curve: StepCost, tokens: int, kv_bytes: int) -> None:
    """The curve is continuous between points and at the border of the grid."""
    here, steepest = curve(tokens + 1, kv_bytes), 1e-8 * max(map(max, curve.seconds))
    assert isclose(curve(tokens + 1 + 1e-9, kv_bytes), here, rel_tol=1e-3, abs_tol=steepest)
    assert isclose(curve(tokens + 1, kv_bytes + 1e-9), here, rel_tol=1e-3, abs_tol=steepest)


@given(curves(), st.integers(1, 10_000), st.integers(1, 10_000))
def test_beyond_the_grid_it_is_linear_and_never_free(curve: StepCost, a: int, b: int) -> None:
    tokens, kv_bytes, corner = curve.tokens[-1], curve.kv_bytes[-1], curve.seconds[-1][-1]
    increase = curve(tokens + a, kv_bytes + b) - corner
    assert increase >= (a * curve.token_seconds + b * curve.byte_seconds) * (1 - ROUNDING) - ROUNDING
    twice = curve(tokens + 2 * a, kv_bytes + 2 * b) - corner
    assert isclose(twice, 2 * increase, rel_tol=1e-6, abs_tol=1e-9)


def test_between_points_it_is_linear_in_both_directions() -> None:
    curve = StepCost((1, 5), (0, 100), ((1.0, 2.0), (3.0, 6.0)))
    assert curve(3) == 2.0
    assert curve(1, 50) == 1.5
    assert curve(3, 50) == 3.0


def test_beyond_the_grid_it_continues_with_its_last_slope() -> None:
    curve = StepCost((1, 2, 4), (0, 10), ((1.0, 1.0), (1.0, 2.0), (5.0, 8.0)))
    assert curve(6) == 9.0
    assert curve(4, 20) == 11.0
    assert curve(6, 20) == 8.0 + 2 * 3.0 + 10 * 0.3


def test_a_flat_end_is_not_free_for_ever() -> None:
    curve = StepCost((8, 16), (0,), ((4.0,), (4.0,)), token_seconds=0.5, byte_seconds=0.25)
    assert curve(18) == 5.0
    assert curve(16, 8) == 6.0


def test_a_step_without_tokens_costs_nothing() -> None:
    curve = StepCost((4,), (0,), ((1.0,),))
    assert (curve(0), curve(1), curve(4)) == (0.0, 1.0, 1.0)


def test_a_disturbed_measurement_costs_no_more_than_a_larger_step() -> None:
    curve = fit((1, 2), (0, 10), [[9.0, 1.0], [1.5, 3.0]])
    assert curve.seconds == ((1.0, 1.0), (1.5, 3.0))


@given(curves(), st.integers(1, 600), st.integers(0, 8000))
def test_long_spans_cost_more_by_their_pairs(curve: StepCost, count: int, start: int) -> None:
    pairs = further_pairs(count, start)
    attended = sum(start + number + 1 for number in range(count))
    assert pairs == attended - start - count
    plain = curve(count, start)
    assert isclose(curve(count, start, pairs), plain + pairs * curve.pair_seconds)


def test_a_curve_counts_in_kv_tokens_too() -> None:
    curve = StepCost((1, 2), (0, 100), ((1.0, 2.0), (1.0, 3.0)))
    cost = curve.in_tokens(10)
    for before, after in pairwise(range(12)):
        assert cost(2, before) == curve(2, 10 * before)
        assert cost(2, after) > cost(2, before)


@pytest.mark.parametrize(
    ("tokens", "kv_bytes", "seconds", "message"),
    [
        ((), (0,), (), "tokens must ascend"),
        ((0, 1), (0,), ((1.0,), (1.0,)), "tokens must ascend from 1"),
        ((2, 2), (0,), ((1.0,), (1.0,)), "tokens must ascend"),
        ((1,), (5, 0), ((1.0, 1.0),), "kv_bytes must ascend"),
        ((1, 2), (0,), ((1.0,),), "a row for each of tokens"),
        ((1,), (0, 1), ((1.0,),), "an entry for each of kv_bytes"),
        ((1,), (0,), ((0.0,),), "positive"),
        ((1,), (0,), ((inf,),), "finite"),
        ((1,), (0,), ((nan,),), "finite"),
        ((1, 2), (0,), ((2.0,), (1.0,)), "must not fall"),
        ((1,), (0, 1), ((2.0, 1.0),), "must not fall"),
    ],
)
def test_invalid_cost_curves_are_refused(tokens, kv_bytes, seconds, message) -> None:
    with pytest.raises(ValueError, match=message):
        StepCost(tokens, kv_bytes, seconds)
