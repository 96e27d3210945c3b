"""A draft model is kept warm in gaps where answers then come sooner, and left alone where they do not."""

import random

import pytest

from streamserve.draft_service.server.keep_warm import AGAIN, GAP, KNOWN, LONGEST, KeepWarmController

COLD, WARM = 0.0016, 0.0012


def gaps(
    keep_warm_controller: KeepWarmController, count: int, cold: float, warm: float, hiccups: float = 0.0
) -> list[bool]:
    """Work comes after so many gaps, and a level takes `cold` or `warm` seconds after them; whether each gap
    was bridged."""
    rng, now, bridged = random.Random(1), 0.0, []
    for _ in range(count):
        now += 0.02
        bridged.append(keep_warm_controller.on)
        keep_warm_controller.gap(0.02)
        seconds = (warm if keep_warm_controller.on else cold) * rng.uniform(0.9, 1.1)
        keep_warm_controller.drafted(seconds + (1.0 if rng.random() < hiccups else 0.0), now)
    return bridged


@pytest.mark.parametrize("hiccups", [0.0, 0.02])
def test_where_it_pays_gaps_are_bridged(hiccups: float) -> None:
    bridged = gaps(KeepWarmController("auto"), 600, COLD, WARM, hiccups)
    assert all(bridged[3 * KNOWN :])
    assert not all(bridged[:KNOWN]), "both ways were tried"


@pytest.mark.parametrize("warm", [COLD, 0.99 * COLD, 1.2 * COLD])
def test_where_it_does_not_pay_they_are_not(warm: float) -> None:
    keep_warm_controller = KeepWarmController("auto")
    bridged = gaps(keep_warm_controller, 600, COLD, warm)
    assert not any(bridged[3 * KNOWN :])
    assert any(bridged[:KNOWN]), "both ways were tried"
    assert not keep_warm_controller.pays


def test_things_may_change() -> None:
    keep_warm_controller = KeepWarmController("auto")
    assert not any(gaps(keep_warm_controller, 900, COLD, COLD)[3 * KNOWN :])
    later = gaps(keep_warm_controller, 5 * AGAIN, COLD, WARM)
    assert all(later[-AGAIN // 2 :])


def test_what_came_right_after_other_work_says_nothing() -> None:
    keep_warm_controller = KeepWarmController("auto")
    for now in range(200):
        keep_warm_controller.gap(GAP / 2)
        keep_warm_controller.drafted(COLD, float(now))
    assert keep_warm_controller.cost(False) == 0.0


def test_one_can_be_told_to_or_not_to() -> None:
    assert all(gaps(KeepWarmController("always"), 300, COLD, 2 * COLD))
    assert not any(gaps(KeepWarmController("never"), 300, COLD, WARM))


def test_passes_for_nobody_are_made_now_and_then_and_not_for_ever() -> None:
    keep_warm_controller = KeepWarmController("always")
    assert keep_warm_controller.due(0.0) is None, "nobody has ever come"
    keep_warm_controller.drafted(None, 1.0)
    now, made = 1.0, []
    while (due := keep_warm_controller.due(now)) is not None:
        now += due
        assert keep_warm_controller.due(now) == pytest.approx(0.0, abs=1e-9)
        made.append(now)
        now += 0.001
        keep_warm_controller.warmed(now)
    assert made[0] > 1.0
    assert 1.0 + LONGEST - 0.01 < now < 1.0 + LONGEST + 0.01
    assert len(made) == keep_warm_controller.passes == pytest.approx(LONGEST / 0.005, rel=0.1)
    assert KeepWarmController("never").due(0.0) is None
