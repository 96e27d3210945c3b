"""Forecasts assume the best case, and infeasible targets are refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.feasibility import Load, best_tpot, best_ttft, infeasible
from streamserve.speculation.outlook import Means


def step_seconds(query_tokens: int) -> float:
    return 0.01 * max(1.0, query_tokens / 16)


def means(draft_seconds: float = 0.0, acceptance: float = 0.7, depth: int = 0) -> Means:
    return Means(step_seconds, lambda requests: draft_seconds * requests, acceptance, depth)


IDLE = Load(decoding=0, queued_tokens=0, max_prompt_tokens=160, mean_output=100.0, means=means())


def test_a_prompt_waits_for_the_queued_tokens_before_it() -> None:
    assert best_ttft(320, IDLE) == pytest.approx(0.2)
    assert best_ttft(320, replace(IDLE, queued_tokens=160)) == pytest.approx(0.3)
    assert best_ttft(8, IDLE) == pytest.approx(0.01)


def test_draft_tokens_make_tokens_faster_than_a_step() -> None:
    assert best_tpot(IDLE) == pytest.approx(0.01)
    assert best_tpot(replace(IDLE, means=means(0.001, 0.9, depth=8))) < 0.005
    assert best_tpot(replace(IDLE, means=means(0.05, 0.1, depth=8))) == pytest.approx(0.01)


def test_feasible_targets_are_not_refused() -> None:
    assert infeasible(None, None, 10_000, IDLE) is None
    assert infeasible(200.0, 10.0, 320, IDLE) is None


def test_a_refusal_says_what_could_be_met_and_when_to_retry() -> None:
    busy = replace(IDLE, decoding=32, queued_tokens=1600)
    refusal = infeasible(500.0, 15.0, 160, busy)
    assert refusal is not None
    missed, retry_after = refusal
    assert missed == ["ttft_ms is 500, and 1320.0 could be met", "tpot_ms is 15, and 20.6 could be met"]
    assert retry_after == pytest.approx(1.2 + 100 * 0.02)


def test_targets_infeasible_on_an_idle_machine_get_the_longest_retry_time() -> None:
    refusal = infeasible(None, 5.0, 160, IDLE)
    assert refusal is not None
    assert refusal[1] == 60.0


@given(st.integers(0, 64), st.integers(0, 5000), st.integers(1, 5000), st.floats(0.1, 1e5))
def test_infeasible_targets_stay_infeasible_under_more_load(
    decoding: int, queued_tokens: int, prompt: int, target: float
) -> None:
    load = replace(IDLE, decoding=decoding, queued_tokens=queued_tokens)
    if infeasible(target, target, prompt, load):
        assert infeasible(
            target, target, prompt, replace(load, decoding=decoding + 1, queued_tokens=queued_tokens + 1)
        )
