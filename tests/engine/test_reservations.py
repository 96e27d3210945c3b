"""Paired workers do not deadlock: rules for eviction, admission and release with transfer reservations."""

from itertools import count

import pytest

from streamserve.engine.reservations import (
    evictable,
    is_admitted_first,
    is_holder,
    may_fail_to_start,
    outranks,
    status_when_dropped,
    take_reservation,
    waits_for_prefix,
)
from streamserve.engine.sequence import EngineSequence, KVState, Transfer
from streamserve.engine.status import SequenceStatus, TransferRole
from streamserve.protocol.messages import Submit
from streamserve.protocol.sampling import SamplingParams

LOCAL, SENDER, COPY, RECEIVER = TransferRole
RUNNING, SENDING = SequenceStatus.RUNNING, SequenceStatus.SENDING
ids = count()


def make(role: TransferRole, reserved: bool = False, status: SequenceStatus = RUNNING) -> EngineSequence:
    submitted = Submit("r", [1, 2], SamplingParams(), outputs={0: []})
    sequence = EngineSequence(
        next(ids), submitted, (0,), submitted.params, 2, [1, 2], KVState(b"", [0]), check=True
    )
    sequence.transfer, sequence.status = Transfer(role, reserved), status
    return sequence


def test_only_a_prompt_with_a_reservation_is_a_holder() -> None:
    assert is_holder(make(SENDER, reserved=True))
    for other in (make(SENDER), make(COPY, reserved=True), make(LOCAL), make(RECEIVER)):
        assert not is_holder(other)


@pytest.mark.parametrize("role", [LOCAL, SENDER, COPY, RECEIVER])
def test_a_sequence_that_is_no_holder_evicts_those_that_rank_lower_and_are_none(role: TransferRole) -> None:
    higher, sequence, lower = make(LOCAL), make(role), make(SENDER)
    ranked = [higher, sequence, make(SENDER, reserved=True), lower]
    assert evictable(sequence, ranked, ranked) == [lower]


def test_a_holder_evicts_all_but_the_holders_that_rank_higher() -> None:
    higher, first, sequence = make(LOCAL), make(SENDER, reserved=True), make(SENDER, reserved=True)
    last, lower = make(SENDER, reserved=True), make(COPY, reserved=True)
    ranked = [first, higher, sequence, last, lower]
    assert evictable(sequence, ranked, ranked) == [higher, last, lower]


@pytest.mark.parametrize("role", [SENDER, COPY])
def test_one_with_a_reservation_evicts_first_those_that_wait_for_theirs(role: TransferRole) -> None:
    """A sequence with a reservation first evicts sequences that wait for theirs; they are not in the step, so
    they have no rank. Sequences that are being sent are not evicted, as another worker reads their blocks."""
    sequence, lower = make(role, reserved=True), make(SENDER)
    waiting, read = make(SENDER, status=SENDING), make(SENDER, reserved=True, status=SENDING)
    assert evictable(sequence, [sequence, lower], [waiting, read, sequence, lower]) == [lower, waiting]
    assert evictable(lower, [sequence, lower], [waiting, read, sequence, lower]) == []


def test_blocks_reserved_for_another_worker_are_not_evicted() -> None:
    sequence, receiving = make(SENDER, reserved=True), make(RECEIVER, status=SequenceStatus.AWAITING_KV)
    assert evictable(sequence, [sequence, receiving], [sequence, receiving]) == []


def test_no_two_sequences_evict_each_other() -> None:
    """No two sequences evict each other, whatever their roles and reservations; otherwise they would take
    each other's blocks forever."""
    for role in TransferRole:
        for other_role in TransferRole:
            for reserved, other_reserved in ((a, b) for a in (False, True) for b in (False, True)):
                first, second = make(role, reserved), make(other_role, other_reserved)
                both = [first, second]
                taken = [second in evictable(first, both, both), first in evictable(second, both, both)]
                assert sum(taken) <= 1


def test_among_holders_and_among_others_the_rank_decides() -> None:
    holder, other = make(SENDER, reserved=True), make(COPY, reserved=True)
    assert outranks(holder, other, ranks_higher=False)
    assert not outranks(other, holder, ranks_higher=True)
    for pair in ((holder, make(SENDER, reserved=True)), (other, make(LOCAL))):
        assert outranks(*pair, ranks_higher=True)
        assert not outranks(*pair, ranks_higher=False)


def test_one_with_a_reservation_waits_for_no_other_to_start() -> None:
    for role in (SENDER, COPY):
        assert is_admitted_first(make(role, reserved=True))
        assert not is_admitted_first(make(role))
        assert not waits_for_prefix(make(role, reserved=True))
        assert waits_for_prefix(make(role))
    assert waits_for_prefix(make(LOCAL))
    assert not waits_for_prefix(make(RECEIVER)), "the sequence computes nothing"


def test_few_tokens_are_planned_for_what_may_fail_to_start() -> None:
    passed_over, receiving = make(LOCAL), make(RECEIVER)
    passed_over.passed_over = receiving.passed_over = True
    assert may_fail_to_start(passed_over)
    assert may_fail_to_start(make(SENDER, reserved=True, status=SequenceStatus.WAITING))
    assert not may_fail_to_start(make(SENDER, reserved=True))
    assert not may_fail_to_start(make(LOCAL, status=SequenceStatus.WAITING))
    assert not may_fail_to_start(receiving)


def test_an_evicted_sequence_with_its_first_token_waits_for_its_reservation() -> None:
    sequence = make(SENDER, status=SENDING)
    assert status_when_dropped(make(SENDER)) is SequenceStatus.WAITING
    sequence.become(status_when_dropped(sequence))
    assert sequence.status is SequenceStatus.AWAITING_RESERVATION
    take_reservation(sequence)
    assert is_holder(sequence)
    assert sequence.status is SequenceStatus.WAITING
    assert sequence.state_stale


def test_a_reservation_changes_nothing_else_for_one_that_has_its_blocks() -> None:
    for status in (RUNNING, SENDING, SequenceStatus.SWAPPED, SequenceStatus.WAITING):
        sequence = make(SENDER, status=status)
        take_reservation(sequence)
        assert (sequence.status, sequence.state_stale) == (status, False)
