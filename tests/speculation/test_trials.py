"""Trials of what is not done now come at growing intervals, and sooner after a surprise."""

from streamserve.speculation.trials import FIRST, LONGEST, Trials


def due(trials: Trials, steps: int, sequences: int = 8) -> list[int]:
    return [step for step in range(1, steps + 1) if trials.due(sequences)]


def test_the_intervals_double_up_to_the_longest() -> None:
    found = due(Trials(), 4000)
    gaps = [after - before for before, after in zip([0, *found], found, strict=False)]
    assert gaps[:6] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, 16 * FIRST, LONGEST]
    assert set(gaps[6:]) == {LONGEST}


def test_what_was_as_expected_is_not_tried_sooner_and_a_surprise_is() -> None:
    calm, surprised = Trials(), Trials()
    for trials, seconds in ((calm, 1.1), (surprised, 3.0)):
        due(trials, 1008)
        trials.found(1.0, seconds)
    assert len(due(surprised, 500)) > len(due(calm, 500))


def test_a_batch_of_another_size_is_tried_soon() -> None:
    trials = Trials()
    due(trials, 2000, sequences=8)
    assert not due(trials, FIRST, sequences=9)
    assert due(trials, FIRST, sequences=32)
