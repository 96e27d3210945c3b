"""In idle gaps, dummy passes keep a draft model warm if and only if that makes answers faster."""

import random

import pytest

from streamserve.draft_service.server.keep_warm import GAP, LONGEST, RETRIAL_GAPS, SAMPLES, KeepWarmController

COLD, WARM = 0.0016, 0.0012


def gaps(
    controller: KeepWarmController, count: int, cold: float, warm: float, hiccups: float = 0.0
) -> list[bool]:
    """Draft after each of `count` gaps. A level takes `cold` seconds, or `warm` seconds on a warm model.
    Return for each gap whether the model was kept warm."""
    rng, now, kept_warm = random.Random(1), 0.0, []
    for _ in range(count):
        now += 0.02
        kept_warm.append(controller.on)
        controller.gap(0.02)
        seconds = (warm if controller.on else cold) * rng.uniform(0.9, 1.1)
        controller.drafted(seconds + (1.0 if rng.random() < hiccups else 0.0), now)
    return kept_warm


@pytest.mark.parametrize("hiccups", [0.0, 0.02])
def test_dummy_passes_are_made_where_they_pay(hiccups: float) -> None:
    kept_warm = gaps(KeepWarmController("auto"), 600, COLD, WARM, hiccups)
    assert all(kept_warm[3 * SAMPLES :])
    assert not all(kept_warm[:SAMPLES]), "both ways were tried"


@pytest.mark.parametrize("warm", [COLD, 0.99 * COLD, 1.2 * COLD])
def test_dummy_passes_are_not_made_where_they_do_not_pay(warm: float) -> None:
    controller = KeepWarmController("auto")
    kept_warm = gaps(controller, 600, COLD, warm)
    assert not any(kept_warm[3 * SAMPLES :])
    assert any(kept_warm[:SAMPLES]), "both ways were tried"
    assert not controller.pays


def test_the_controller_adapts_to_changed_costs() -> None:
    controller = KeepWarmController("auto")
    assert not any(gaps(controller, 900, COLD, COLD)[3 * SAMPLES :])
    later = gaps(controller, 5 * RETRIAL_GAPS, COLD, WARM)
    assert all(later[-RETRIAL_GAPS // 2 :])


def test_batches_without_a_gap_are_not_measured() -> None:
    controller = KeepWarmController("auto")
    for now in range(200):
        controller.gap(GAP / 2)
        controller.drafted(COLD, float(now))
    assert controller.cost(False) == 0.0


def test_keeping_warm_can_be_forced_on_or_off() -> None:
    assert all(gaps(KeepWarmController("always"), 300, COLD, 2 * COLD))
    assert not any(gaps(KeepWarmController("never"), 300, COLD, WARM))


def test_dummy_passes_are_made_at_intervals_and_stop() -> None:
    controller = KeepWarmController("always")
    assert controller.due(0.0) is None, "no request has ever come"
    controller.drafted(None, 1.0)
    now, made = 1.0, []
    while (due := controller.due(now)) is not None:
        now += due
        assert controller.due(now) == pytest.approx(0.0, abs=1e-9)
        made.append(now)
        now += 0.001
        controller.warmed(now)
    assert made[0] > 1.0
    assert 1.0 + LONGEST - 0.01 < now < 1.0 + LONGEST + 0.01
    assert len(made) == controller.passes == pytest.approx(LONGEST / 0.005, rel=0.1)
    assert KeepWarmController("never").due(0.0) is None
