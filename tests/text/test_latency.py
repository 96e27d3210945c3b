"""Latencies are measured correctly, and compared with the targets."""

import pytest

from streamserve.protocol.sampling import Slo
from streamserve.text.latency import SloOutcome, Stopwatch, combined


def measured(*tokens: tuple[int, float]) -> Stopwatch:
    watch = Stopwatch(1.0)
    for choice, now in tokens:
        watch.token(choice, now)
    return watch


def test_time_to_the_first_token_and_mean_time_of_the_others() -> None:
    """The first token is at 1.5, and three more until 3.0: 500 ms to the first token, and 500 ms for each
    further one."""
    watch = measured((0, 1.5), (0, 1.6), (0, 2.9), (0, 3.0))
    assert watch.outcome(Slo(tpot_ms=500.0, ttft_ms=500.0)) == SloOutcome(True, 500.0, 500.0)
    for missed in (Slo(tpot_ms=499.0), Slo(ttft_ms=499.0), Slo(tpot_ms=1e3, ttft_ms=1.0)):
        outcome = watch.outcome(missed)
        assert outcome is not None
        assert not outcome.met


def test_the_slowest_choice_counts() -> None:
    watch = measured((0, 1.25), (1, 1.5), (0, 1.5), (1, 2.5))
    assert watch.outcome(Slo(tpot_ms=900.0)) == SloOutcome(False, 500.0, 1000.0)


@pytest.mark.parametrize(("tokens", "ttft"), [((), None), (((0, 2.0),), 1000.0)])
def test_a_latency_without_measurement_meets_its_target(tokens, ttft) -> None:
    assert measured(*tokens).outcome(Slo(tpot_ms=1.0)) == SloOutcome(True, ttft, None)


def test_without_targets_there_is_no_outcome() -> None:
    assert measured((0, 2.0)).outcome(Slo()) is None
    assert combined([]) is None


def test_several_prompts_are_one_request() -> None:
    parts = [SloOutcome(True, 5.0, None), SloOutcome(False, 2.0, 7.0)]
    assert combined(parts) == SloOutcome(False, 5.0, 7.0)
