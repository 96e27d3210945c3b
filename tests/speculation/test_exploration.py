"""Exploration deviates from the proposed shapes at intervals, so that the statistics stay current."""

import pytest

from streamserve.speculation.exploration import DRAFT_TRIAL, PROBE, PROBE_EVERY, TRIAL_LEVELS, Exploration
from streamserve.speculation.outlook import Candidate, Outlook
from streamserve.speculation.shapes import PLAIN, TreeShape
from streamserve.speculation.trials import FIRST

DEEP = TreeShape(TRIAL_LEVELS + 1, 1)


def outlook(step=lambda query_tokens: 1.0, acceptance: float = 0.5, count: int = 2) -> Outlook:
    return Outlook(
        candidates=[Candidate(16, 16, id=number) for number in range(count)],
        others=0,
        step=step,
        draft=lambda shapes: 0.1 * max(shape.depth for shape in shapes),
        level_acceptance=((acceptance,), (acceptance,)),
        nodes=16,
    )


def explored(exploration: Exploration, proposed: TreeShape, steps: int, view: Outlook) -> list[int]:
    """Return the steps whose shapes differ from the proposed shapes."""
    shapes = [proposed] * len(view.candidates)
    return [
        step
        for step in range(1, steps + 1)
        if exploration.explore(view, list(shapes), lambda query_tokens: 1 / 3).shapes != shapes
    ]


def test_one_request_at_a_time_is_probed_after_many_plain_steps() -> None:
    exploration, probed = Exploration(trials=False), []
    for step in range(1, 2 * PROBE_EVERY + 1):
        shapes, trials, verify_all = exploration.explore(outlook(), [PLAIN, PLAIN], lambda tokens: 1.0)
        assert trials is None
        assert verify_all, "a probe is verified at any cost"
        if shapes != [PLAIN, PLAIN]:
            probed.append((step, shapes))
    assert probed == [(PROBE_EVERY, [PLAIN, PROBE]), (2 * PROBE_EVERY, [PROBE, PLAIN])]


def test_draft_tokens_end_the_count_of_plain_steps() -> None:
    exploration = Exploration(trials=False)
    assert not explored(exploration, PLAIN, PROBE_EVERY - 1, outlook())
    exploration.explore(outlook(), [DEEP, DEEP], lambda tokens: 1.0)
    assert exploration.plain_steps == 0
    assert explored(exploration, PLAIN, PROBE_EVERY, outlook()) == [PROBE_EVERY]


@pytest.mark.parametrize(("trials", "steps"), [(True, [FIRST]), (False, [])])
def test_plain_steps_are_tried_while_speculation_is_in_use(trials: bool, steps: list[int]) -> None:
    assert explored(Exploration(trials), DEEP, 2 * FIRST, outlook()) == steps


def test_plain_steps_are_not_tried_where_they_could_not_pay() -> None:
    certain = outlook(acceptance=1.0, step=lambda query_tokens: 10.0)
    assert not explored(Exploration(trials=True), DEEP, 2 * FIRST, certain)


def test_a_chain_is_tried_where_it_would_pay_if_its_steps_were_cheaper() -> None:
    exploration = Exploration(trials=True)
    dear = outlook(acceptance=0.9, step=lambda query_tokens: 1.0 if query_tokens <= 2 else 3.0)
    assert explored(exploration, PLAIN, DRAFT_TRIAL - 1, dear) == []
    shapes, trials, verify_all = exploration.explore(dear, [PLAIN, PLAIN], lambda query_tokens: 1.0)
    assert shapes[0].depth > 0
    assert shapes[0].width == 1
    assert trials is not None
    assert verify_all


def test_a_chain_that_would_not_pay_in_any_case_is_not_tried() -> None:
    exploration = Exploration(trials=True)
    dear = outlook(acceptance=0.1, step=lambda query_tokens: 1.0 if query_tokens <= 2 else 3.0)
    shapes = [PLAIN, PLAIN]
    assert all(
        exploration.explore(dear, list(shapes), lambda query_tokens: 1.0).trials is None
        for _ in range(2 * DRAFT_TRIAL)
    )
