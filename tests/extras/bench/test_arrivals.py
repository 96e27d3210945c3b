from pathlib import Path

import numpy as np
import pytest

from streamserve.extras.bench.arrivals import gamma_arrivals, trace_arrivals
from streamserve.extras.bench.errors import BenchError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert gamma_arrivals(3, float("inf"), 1.0, rng()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 8.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness: float) -> None:
    times = np.array(gamma_arrivals(20_001, 5.0, burstiness, rng()))
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.var() == pytest.approx((1 / 5) ** 2 / burstiness, rel=0.15)


def test_a_seed_gives_the_same_times() -> None:
    assert gamma_arrivals(9, 2.0, 1.0, rng(4)) == gamma_arrivals(9, 2.0, 1.0, rng(4))
    assert gamma_arrivals(9, 2.0, 1.0, rng(4)) != gamma_arrivals(9, 2.0, 1.0, rng(5))


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0), (1, float("inf"))]
)
def test_invalid_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(BenchError, match="must be positive"):
        gamma_arrivals(3, rate, burstiness, rng())


def test_a_trace_begins_at_its_first_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text('100.5\n{"timestamp": 101, "more": 1}\n\n103.25\n104\n')
    assert trace_arrivals(trace, 3) == [0.0, 0.5, 2.75]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n", "has 1 times"),
        ("2\n1\n", "trace:2: 1 is before"),
        ("1\ntrue\n", "trace:2 must be a number"),
        ('1\n{"time": 2}\n', "trace:2 must be a number"),
        ("1\nNaN\n", "trace:2 must be a number"),
        ("1\nsoon\n", "trace:2 is not JSON"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    with pytest.raises(BenchError, match=message):
        trace_arrivals(trace, 2)
