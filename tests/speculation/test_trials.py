"""Trials of the other mode come at growing intervals, and sooner after an unexpected result."""

from streamserve.speculation.trials import FIRST, MAX_WAIT_STEPS, Trials


def due(trials: Trials, count: int, sequences: int = 8) -> list[int]:
    return [step for step in range(1, count + 1) if trials.due(sequences)]


def test_the_intervals_double_up_to_the_longest() -> None:
    steps_tried = due(Trials(), 4000)
    gaps = [after - before for before, after in zip([0, *steps_tried], steps_tried, strict=False)]
    assert gaps[:6] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, 16 * FIRST, MAX_WAIT_STEPS]
    assert set(gaps[6:]) == {MAX_WAIT_STEPS}


def test_an_expected_result_is_not_tried_sooner_and_an_unexpected_one_is() -> None:
    confirmed, contradicted = Trials(), Trials()
    for trials, seconds in ((confirmed, 1.1), (contradicted, 3.0)):
        due(trials, 1008)
        trials.record(1.0, seconds)
    assert len(due(contradicted, 500)) > len(due(confirmed, 500))


def test_a_batch_of_another_size_is_tried_soon() -> None:
    trials = Trials()
    due(trials, 2000, sequences=8)
    assert not due(trials, FIRST, sequences=9)
    assert due(trials, FIRST, sequences=32)
