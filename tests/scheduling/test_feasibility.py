"""Forecasts of the best that could happen, and refusals of what is hopeless."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.feasibility import Load, best_tpot, best_ttft, infeasible


def seconds(rows: int) -> float:
    return 0.01 * max(1.0, rows / 16)


IDLE = Load(decoding=0, ahead=0, seconds=seconds, most=160, mean_output=100.0)


def test_a_prompt_waits_for_those_ahead_of_it() -> None:
    assert best_ttft(320, IDLE) == pytest.approx(0.2)
    assert best_ttft(320, replace(IDLE, ahead=160)) == pytest.approx(0.3)
    assert best_ttft(8, IDLE) == pytest.approx(0.01)


def test_guesses_make_tokens_faster_than_a_step() -> None:
    assert best_tpot(IDLE) == pytest.approx(0.01)
    assert best_tpot(replace(IDLE, draft=0.001, cover=0.9, depth=8)) < 0.005
    assert best_tpot(replace(IDLE, draft=0.05, cover=0.1, depth=8)) == pytest.approx(0.01)


def test_what_can_be_met_is_not_refused() -> None:
    assert infeasible(None, None, 10_000, IDLE) is None
    assert infeasible(200.0, 10.0, 320, IDLE) is None


def test_a_refusal_says_what_could_be_met_and_when_to_come_again() -> None:
    busy = replace(IDLE, decoding=32, ahead=1600)
    found = infeasible(500.0, 15.0, 160, busy)
    assert found is not None
    missed, again = found
    assert missed == ["ttft_ms is 500, and 1320.0 could be met", "tpot_ms is 15, and 20.6 could be met"]
    assert again == pytest.approx(1.2 + 100 * 0.02)


def test_what_an_idle_machine_could_not_meet_is_put_off_longest() -> None:
    found = infeasible(None, 5.0, 160, IDLE)
    assert found is not None
    assert found[1] == 60.0


@given(st.integers(0, 64), st.integers(0, 5000), st.integers(1, 5000), st.floats(0.1, 1e5))
def test_more_load_never_gives_hope(decoding: int, ahead: int, prompt: int, target: float) -> None:
    load = replace(IDLE, decoding=decoding, ahead=ahead)
    if infeasible(target, target, prompt, load):
        assert infeasible(target, target, prompt, replace(load, decoding=decoding + 1, ahead=ahead + 1))
