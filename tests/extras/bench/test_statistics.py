import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.statistics import (
    Outcome,
    latency_stats,
    meets,
    parse_metrics,
    parse_targets,
    peak_concurrency,
    running_over_time,
    summarize,
    tokens_by_second,
    values,
)

FOUR_TOKENS = Outcome(sent=0.0, latency=0.8, token_times=(0.2, 0.4, 0.7), prompt_tokens=10, output_tokens=4)
ONE_TOKEN = Outcome(sent=0.5, latency=0.3, token_times=(0.3,), prompt_tokens=5, output_tokens=1)
FAILED = Outcome(sent=0.1, latency=9.0, error="429: busy")


def test_latencies_of_a_request() -> None:
    assert FOUR_TOKENS.ttft == 0.2
    assert FOUR_TOKENS.tpot == pytest.approx(0.2)
    assert FOUR_TOKENS.itl == pytest.approx([0.2, 0.3])
    assert (ONE_TOKEN.ttft, ONE_TOKEN.tpot, ONE_TOKEN.itl) == (0.3, None, [])
    assert (FAILED.ttft, FAILED.tpot, FAILED.itl) == (None, None, [])


def test_a_summary_counts_only_complete_replies() -> None:
    summary = summarize([FOUR_TOKENS, ONE_TOKEN, FAILED], 2.0, {}, interrupted=3)
    assert (summary.completed, summary.failed, summary.interrupted) == (2, 1, 3)
    assert (summary.input_tokens, summary.output_tokens) == (15, 5)
    assert (summary.request_throughput, summary.output_throughput, summary.total_throughput) == (1, 2.5, 10)
    assert summary.goodput is None
    assert summary.latency_stats["e2el"].mean == pytest.approx(550)
    assert summary.latency_stats["tpot"].p99 == pytest.approx(200)


def test_input_tokens_are_unknown_as_soon_as_one_is() -> None:
    unreported = Outcome(sent=0, latency=1, token_times=(0.5,), output_tokens=1, counted=True)
    summary = summarize([FOUR_TOKENS, unreported], 1.0, {})
    assert (summary.input_tokens, summary.total_throughput, summary.counted) == (None, None, 1)
    assert summary.output_tokens == 5


def test_without_complete_replies_all_is_zero() -> None:
    summary = summarize([FAILED], 1.0, {"ttft": 1.0})
    assert (summary.completed, summary.output_throughput, summary.goodput) == (0, 0, 0)
    assert summary.latency_stats["ttft"].p99 == 0


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        ({"ttft": 200.0}, 1),
        ({"ttft": 300.0}, 2),
        ({"ttft": 300.0, "tpot": 199.0}, 1),
        ({"e2el": 799.0}, 1),
        ({"e2el": 800.0, "tpot": 201.0, "ttft": 300.0}, 2),
    ],
)
def test_goodput_counts_those_that_meet_every_target(targets: dict[str, float], good: int) -> None:
    summary = summarize([FOUR_TOKENS, ONE_TOKEN, FAILED], 2.0, targets)
    assert summary.goodput == good / 2


def test_a_request_without_a_first_token_misses_no_target_of_it() -> None:
    assert meets(Outcome(sent=0, latency=0.1), {"ttft": 1.0})
    assert not meets(Outcome(sent=0, latency=0.1), {"ttft": 1.0, "e2el": 99.0})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_latency_stats_are_those_of_numpy(samples: list[float]) -> None:
    result = latency_stats(samples)
    assert result.median == float(np.median(samples))
    assert result.p99 == float(np.percentile(samples, 99))
    assert min(samples) <= result.median <= result.p99 <= max(samples)


def test_tokens_are_counted_in_the_second_of_their_arrival() -> None:
    two_an_event = Outcome(sent=0.5, latency=2, token_times=(0.1, 1.6), output_tokens=4)
    assert tokens_by_second([two_an_event, ONE_TOKEN]) == [3.0, 0.0, 2.0]
    assert tokens_by_second([FAILED]) == []
    assert summarize([two_an_event, ONE_TOKEN], 3.0, {}).peak_output_throughput == 3.0


def test_requests_that_follow_each_other_are_never_open_together() -> None:
    first, second = Outcome(sent=0.0, latency=1.0), Outcome(sent=1.0, latency=1.0)
    assert peak_concurrency([first, second]) == 1
    assert peak_concurrency([first, second, Outcome(sent=0.5, latency=1.0)]) == 2
    assert running_over_time([first])[-1] == (1.0, 0)


def test_values_are_in_milliseconds() -> None:
    assert values([FOUR_TOKENS, ONE_TOKEN], "ttft") == [200, 300]
    assert values([FOUR_TOKENS, ONE_TOKEN], "itl") == pytest.approx([200, 300])


def test_targets_are_parsed() -> None:
    assert parse_targets(["ttft:500", "tpot:12.5"]) == {"ttft": 500.0, "tpot": 12.5}


@pytest.mark.parametrize("bad", ["ttft", "ttft:", "itl:5", "ttft:-1", "tpot:nan", "ttft:5ms"])
def test_invalid_targets_are_refused(bad: str) -> None:
    with pytest.raises(BenchError, match="write ttft, tpot or e2el"):
        parse_targets([bad])


def test_metrics_are_parsed() -> None:
    assert parse_metrics("ttft, itl") == ["ttft", "itl"]
    with pytest.raises(BenchError, match="no metric 'latency'"):
        parse_metrics("latency")
