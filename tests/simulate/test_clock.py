"""The virtual clock runs actions in the order of their times."""

from streamserve.simulate.clock import VirtualClock


def test_actions_run_in_order_of_time_and_then_of_scheduling() -> None:
    clock, ran = VirtualClock(), []
    for name, time in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        clock.at(time, lambda name=name: ran.append((name, clock.now)))
    clock.run()
    assert ran == [("first", 1.0), ("second", 1.0), ("late", 2.0)]
    assert clock() == 2.0


def test_an_action_scheduled_for_now_runs_when_the_present_one_has_returned() -> None:
    clock, ran = VirtualClock(), []

    def act() -> None:
        clock.after(0.0, lambda: ran.append("scheduled"))
        ran.append("present")

    clock.at(1.0, act)
    clock.at(1.0, lambda: ran.append("scheduled before"))
    clock.run()
    assert ran == ["present", "scheduled before", "scheduled"]


def test_a_run_stops_at_its_limit() -> None:
    clock, ran = VirtualClock(), []
    clock.at(1.0, lambda: ran.append(1))
    clock.at(3.0, lambda: ran.append(3))
    clock.run(until=2.0)
    assert (ran, clock.now, clock.pending) == ([1], 1.0, True)
    clock.run()
    assert (ran, clock.pending) == ([1, 3], False)
