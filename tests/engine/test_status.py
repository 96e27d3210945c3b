"""A sequence's status changes only by legal transitions, through a single method."""

from itertools import product

import pytest

from streamserve.engine.sequence import EngineSequence, KVState, StatusError
from streamserve.engine.status import TRANSITIONS, SequenceStatus
from streamserve.protocol.messages import Submit
from streamserve.protocol.sampling import SamplingParams

LEGAL = [(before, after) for before in TRANSITIONS for after in TRANSITIONS[before]]
ILLEGAL = [change for change in product(SequenceStatus, repeat=2) if change not in LEGAL]


def make_sequence(status: SequenceStatus, check: bool = True) -> EngineSequence:
    submitted = Submit("r", [1, 2], SamplingParams(), outputs={0: []})
    sequence = EngineSequence(7, submitted, (0,), submitted.params, 2, [1, 2], KVState(b"", [0]), check=check)
    sequence.status = status
    return sequence


@pytest.mark.parametrize(("before", "after"), LEGAL)
def test_a_legal_change_is_made(before: SequenceStatus, after: SequenceStatus) -> None:
    sequence = make_sequence(before)
    sequence.become(after)
    assert sequence.status is after


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_an_illegal_change_raises_and_is_not_made(before: SequenceStatus, after: SequenceStatus) -> None:
    sequence = make_sequence(before)
    with pytest.raises(StatusError, match=f"sequence 7 of r cannot become {after.label}"):
        sequence.become(after)
    assert sequence.status is before


def test_without_check_nothing_raises() -> None:
    sequence = make_sequence(SequenceStatus.SENDING, check=False)
    sequence.become(SequenceStatus.SWAPPED)
    assert sequence.status is SequenceStatus.SWAPPED


def test_every_status_can_be_reached_and_left() -> None:
    reached = {SequenceStatus.WAITING}
    for _ in SequenceStatus:
        reached |= {after for before in reached for after in TRANSITIONS[before]}
    assert reached == set(SequenceStatus) == {status for status in SequenceStatus if TRANSITIONS[status]}


def test_another_choice_of_a_request_is_checked_too() -> None:
    sequence = make_sequence(SequenceStatus.RUNNING)
    branch = sequence.branch(8, 1)
    assert branch.status is SequenceStatus.WAITING
    assert branch.check
