"""A draft model is kept warm in gaps where answers then come sooner, and left alone where they do not."""

import random

import pytest

from streamserve.draft_service.server.keep_warm import AGAIN, GAP, KNOWN, LONGEST, KeepWarmController

COLD, WARM = 0.0016, 0.0012


def gaps(
    warmth: KeepWarmController, count: int, cold: float, warm: float, hiccups: float = 0.0
) -> list[bool]:
    """Work comes after so many gaps, and a level takes `cold` or `warm` seconds after them; whether each gap
    was bridged."""
    rng, now, bridged = random.Random(1), 0.0, []
    for _ in range(count):
        now += 0.02
        bridged.append(warmth.on)
        warmth.gap(0.02)
        seconds = (warm if warmth.on else cold) * rng.uniform(0.9, 1.1)
        warmth.drafted(seconds + (1.0 if rng.random() < hiccups else 0.0), now)
    return bridged


@pytest.mark.parametrize("hiccups", [0.0, 0.02])
def test_where_it_pays_gaps_are_bridged(hiccups: float) -> None:
    bridged = gaps(KeepWarmController("auto"), 600, COLD, WARM, hiccups)
    assert all(bridged[3 * KNOWN :])
    assert not all(bridged[:KNOWN]), "both ways were tried"


@pytest.mark.parametrize("warm", [COLD, 0.99 * COLD, 1.2 * COLD])
def test_where_it_does_not_pay_they_are_not(warm: float) -> None:
    warmth = KeepWarmController("auto")
    bridged = gaps(warmth, 600, COLD, warm)
    assert not any(bridged[3 * KNOWN :])
    assert any(bridged[:KNOWN]), "both ways were tried"
    assert not warmth.pays


def test_things_may_change() -> None:
    warmth = KeepWarmController("auto")
    assert not any(gaps(warmth, 900, COLD, COLD)[3 * KNOWN :])
    later = gaps(warmth, 5 * AGAIN, COLD, WARM)
    assert all(later[-AGAIN // 2 :])


def test_what_came_right_after_other_work_says_nothing() -> None:
    warmth = KeepWarmController("auto")
    for now in range(200):
        warmth.gap(GAP / 2)
        warmth.drafted(COLD, float(now))
    assert warmth.cost(False) == 0.0


def test_one_can_be_told_to_or_not_to() -> None:
    assert all(gaps(KeepWarmController("always"), 300, COLD, 2 * COLD))
    assert not any(gaps(KeepWarmController("never"), 300, COLD, WARM))


def test_passes_for_nobody_are_made_now_and_then_and_not_for_ever() -> None:
    warmth = KeepWarmController("always")
    assert warmth.due(0.0) is None, "nobody has ever come"
    warmth.drafted(None, 1.0)
    now, made = 1.0, []
    while (due := warmth.due(now)) is not None:
        now += due
        assert warmth.due(now) == pytest.approx(0.0, abs=1e-9)
        made.append(now)
        now += 0.001
        warmth.warmed(now)
    assert made[0] > 1.0
    assert 1.0 + LONGEST - 0.01 < now < 1.0 + LONGEST + 0.01
    assert len(made) == warmth.passes == pytest.approx(LONGEST / 0.005, rel=0.1)
    assert KeepWarmController("never").due(0.0) is None
