"""The service in virtual time matches the predictions of the StarSD model: regimes, idle time, saturation."""

import random

import pytest

from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.types import ServiceConfig
from streamserve.draft_service.star import Star as Model
from tests.conftest import Scale
from tests.draft_service.star import Network, Star

S, Z, SECONDS = 0.01, 0.04, 10.0
OPEN = Limits(by_model=False)


def star_of(targets: int, max_batch: int = 1, limits: Limits = OPEN, draft: float = S, **fields) -> Star:
    def cost(batch) -> float:
        return draft * max(1.0, 0.9 + 0.1 * len(batch.requests))

    config = ServiceConfig(num_blocks=4000, max_batch=max_batch, max_batch_seconds=1.0, limits=limits)
    star = Star(
        random.Random(1), config, targets, 1, Network(delay=0.0), cost,
        verify=Z, max_wait=5.0, length=400, **fields,
    )  # fmt: skip
    star.run(5.0)
    return star


def tokens(star: Star) -> int:
    """Return the number of tokens that each target received within the next seconds."""
    before = sum(target.rounds + target.accepted for target in star.targets)
    star.run(SECONDS)
    return sum(target.rounds + target.accepted for target in star.targets) - before


@pytest.mark.parametrize("count", range(1, 9))
def test_one_at_a_time_rounds_idle_time_and_load_are_as_predicted(count, scale: Scale):
    if not scale.full and count not in (1, 4, 5, 8):
        pytest.skip("with --full; five targets keep the service busy, four do not")
    star, model = star_of(count), Model(S, Z)
    counters = star.services[0].statistics.counters
    busy, idle, rounds = counters.busy, counters.idle, counters.rounds
    tokens(star)
    rounds = counters.rounds - rounds
    assert SECONDS * count / rounds == pytest.approx(model.round(count), rel=0.05)
    assert (counters.idle - idle) / rounds * count == pytest.approx(model.idle(count), rel=0.15, abs=1e-3)
    assert (counters.busy - busy) / SECONDS == pytest.approx(model.load(count), rel=0.05)


def test_five_targets_keep_it_busy_and_get_several_times_what_one_gets():
    one, five = star_of(1), star_of(5)
    assert tokens(five) >= 3.4 * tokens(one)
    assert five.services[0].statistics.star().n_full == 5


def test_batches_lift_the_limit():
    draft_alone, together = star_of(8, 1), star_of(8, 16)
    assert tokens(together) >= 1.5 * tokens(draft_alone)
    counters = together.services[0].statistics.counters
    assert counters.requests / counters.batches > 1.5


def test_targets_beyond_n_max_are_busy_and_the_others_still_gain():
    """Beyond n_max, targets are told that the service is busy, and the served targets still gain. Drafting is
    so expensive here that only some targets can gain."""
    limits = Limits(active_for=0.5, retry=0.2)
    star = star_of(8, 1, limits, draft=0.02, depth=2)
    star.run(10.0)
    service = star.services[0]
    n_max = service.table.n_max()
    assert 1 < n_max < 8
    assert n_max == service.batcher.capacity().n_max(
        service.statistics.progress, service.statistics.plain.value
    )
    before = [target.rounds + target.accepted for target in star.targets]
    star.run(SECONDS)
    gained = [
        (target.rounds + target.accepted - was) * Z / SECONDS
        for target, was in zip(star.targets, before, strict=True)
    ]
    assert len(service.table.active(star.now)) <= n_max
    assert min(gained) >= 0.98, "no target is slower than without a draft"
    assert sum(gain > 1.05 for gain in gained) >= n_max - 1
