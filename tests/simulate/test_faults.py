"""An injected crash or a poison request fails the right workers at the right time."""

import pytest

from streamserve.simulate.faults import FaultInjection, FaultInjector, InjectedCrash, Poison


def injector() -> tuple[FaultInjector, list[tuple[str, bool]]]:
    failed: list[tuple[str, bool]] = []
    return FaultInjector(lambda worker, silent: failed.append((worker, silent))), failed


def test_the_nth_event_at_any_worker_fails_the_victims_once() -> None:
    faults, failed = injector()
    faults.inject(FaultInjection("swap", 2, ("b", "c"), stop=True))
    faults.reach_event("a", "swap")
    faults.reach_event("a", "edit")
    assert (failed, faults.injected) == ([], [])
    faults.reach_event("a", "swap")
    assert (failed, faults.injected) == ([("b", True), ("c", True)], ["swap"])
    faults.reach_event("b", "swap")
    assert len(failed) == 2


def test_a_victim_that_reaches_the_event_does_not_continue() -> None:
    faults, failed = injector()
    faults.inject(FaultInjection("swap", 1, ("a", "b")))
    with pytest.raises(InjectedCrash):
        faults.reach_event("a", "swap")
    assert failed == [("a", False), ("b", False)]


def test_a_poison_crashes_every_worker_in_its_phase() -> None:
    faults, failed = injector()
    faults.poison(Poison("r", "draft"))
    faults.reach_phase("a", "r", "verify", alone=True)
    faults.reach_phase("a", "other", "draft", alone=False)
    assert not failed
    for worker in ("a", "b"):
        with pytest.raises(InjectedCrash):
            faults.reach_phase(worker, "r", "draft", alone=True)
    assert failed == [("a", False), ("b", False)]


def test_a_co_batched_poison_does_no_harm_alone() -> None:
    faults, failed = injector()
    faults.poison(Poison("r", "draft", co_batched=True))
    faults.reach_phase("a", "r", "draft", alone=True)
    assert not failed
    with pytest.raises(InjectedCrash):
        faults.reach_phase("a", "r", "draft", alone=False)
