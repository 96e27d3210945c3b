"""A target measures a service's batch times by size, its reading speed, and its acceptance."""

import pytest

from streamserve.draft_service.target.measures import (
    HALF_LIFE_SECONDS,
    RECENT_SECONDS,
    AcceptanceRate,
    AnswerTimes,
    BatchSeconds,
)
from streamserve.protocol.drafting import Draft, Drafts, Pong


def drafts(trees: int, seconds: float, waited: float = 0.0, queue: float = 0.0) -> Drafts:
    each = [Draft(number, 0, 1, None) for number in range(trees)]
    return Drafts(tag=1, drafts=each, waited=waited, seconds=seconds, queue=queue)


def test_the_seconds_of_one_more_tree_are_measured_where_batches_differ() -> None:
    batch = BatchSeconds()
    for turn in range(200):
        trees = 1 + turn % 8
        batch.add(trees, 0.010 + 0.002 * trees)
    assert batch.per_tree == pytest.approx(0.002, rel=0.1)
    flat = BatchSeconds()
    for turn in range(200):
        flat.add(1 + turn % 8, 0.010)
    assert flat.per_tree == pytest.approx(0.0, abs=1e-6)
    same = BatchSeconds()
    for _ in range(20):
        same.add(4, 0.010)
    assert 0.0 < same.per_tree < 0.010 / 4, "assumed"


def test_one_outlier_counts_little() -> None:
    batch = BatchSeconds()
    for _ in range(20):
        batch.add(1, 0.010)
    batch.add(1, 10.0)
    assert batch.seconds < 0.015


def test_long_deltas_measure_reading_and_not_drafting() -> None:
    times = AnswerTimes()
    times.drafted(drafts(1, 0.010), 1, 0.0)
    times.drafted(drafts(1, 0.110, waited=0.4), 500, 1.0)
    assert times.batch.seconds == pytest.approx(0.010)
    assert times.read == pytest.approx(0.001)
    times.drafted(drafts(1, 0.0), 1, 2.0)
    assert times.batch.count == 1, "a repeated answer has no seconds"


def test_what_a_service_reports_counts_when_own_batches_are_old() -> None:
    times = AnswerTimes()
    assert times.batch_now(0.0).seconds == 0.0, "unknown"
    times.drafted(drafts(4, 0.010), 1, 0.0)
    times.ponged(Pong(1, 1.0, 0.3, 0.05, 2), 1.002)
    assert (times.queue, times.round_trip) == (0.3, pytest.approx(0.002))
    assert (times.batch_now(1.0).trees, times.batch_now(1.0).seconds) == (4.0, 0.010)
    assert times.batch_now(RECENT_SECONDS + 1.0).seconds == 0.05


def test_acceptance_is_forgotten_with_time_and_trees() -> None:
    acceptance = AcceptanceRate()
    for turn in range(1000):
        acceptance.add(4 if turn < 500 else 1, 0.0)
    trees, accepted = acceptance.at(0.0)
    assert accepted / trees == pytest.approx(1.0, abs=0.05)
    assert acceptance.at(HALF_LIFE_SECONDS) == (pytest.approx(trees / 2), pytest.approx(accepted / 2))
