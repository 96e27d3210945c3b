"""A target records which tokens of a sequence a service has, and accepts only answers that match them."""

import pytest

from streamserve.contracts.plan import DraftRequest
from streamserve.draft_service.target.answers import LOST_IN_A_ROW
from streamserve.draft_service.target.synced import SyncedSequence, SyncedSequences, WrongAnswerError
from streamserve.protocol.drafting import Draft, Tree
from streamserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
VOCABULARY = 96


def request(tokens: list[int], epoch: int = 0) -> DraftRequest:
    return DraftRequest(1, epoch, tokens, len(tokens), 0, 0, GREEDY, 2, 1, 2, 0, [])


def synced(tokens: list[int]) -> SyncedSequence:
    return SyncedSequence(GREEDY, 0, tokens, len(tokens))


def answer(number: int, *tokens: int, epoch: int = 0) -> Draft:
    ones = (1.0,) * len(tokens)
    return Draft(1, epoch, number, Tree(tokens, (-1, *range(len(tokens) - 1)), ones, ones))


def test_only_new_tokens_are_sent_and_the_last_one_again_in_a_repeated_request() -> None:
    sequence = synced([5, 6, 7])
    first = sequence.delta(request([5, 6, 7]), 0.0)
    assert (first.base, first.retained, first.tokens, first.params) == (0, 0, [5, 6, 7], GREEDY)
    sequence.sync(request([5, 6, 7, 8]))
    second = sequence.delta(request([5, 6, 7, 8]), 1.0)
    assert (second.base, second.retained, second.tokens, second.params) == (1, 3, [8], None)
    repeated = sequence.delta(request([5, 6, 7, 8]), 2.0)
    assert (repeated.base, repeated.retained, repeated.tokens) == (2, 3, [8])


def test_a_new_epoch_is_synced_as_a_whole() -> None:
    sequence = synced([5, 6, 7])
    sequence.delta(request([5, 6, 7]), 0.0)
    sequence.sync(request([5, 9], epoch=1))
    delta = sequence.delta(request([5, 9], epoch=1), 1.0)
    assert (delta.base, delta.retained, delta.tokens) == (0, 0, [5, 9])


def test_an_answer_is_accepted_once_and_a_late_one_ignored() -> None:
    sequence = synced([5, 6])
    sequence.delta(request([5, 6]), 1.0)
    assert sequence.accept(answer(1, 6, 7), VOCABULARY, 3.0) == 2.0
    assert sequence.ready() is not None
    assert sequence.accept(answer(1, 6, 8), VOCABULARY, 4.0) is None


@pytest.mark.parametrize(
    ("draft", "fault"),
    [
        (answer(2, 6, 7), "foreign"),
        (answer(-1, 6, 7), "foreign"),
        (answer(1, 6, 7, epoch=1), "foreign"),
        (answer(1, 5, 7), "tree"),
        (answer(1, 6, VOCABULARY), "tree"),
    ],
)
def test_an_answer_that_no_honest_service_sends_is_named(draft: Draft, fault: str) -> None:
    sequence = synced([5, 6])
    sequence.delta(request([5, 6]), 1.0)
    with pytest.raises(WrongAnswerError) as wrong:
        sequence.accept(draft, VOCABULARY, 2.0)
    assert wrong.value.fault == fault
    assert sequence.ready() is None


def test_a_sequence_that_is_lost_again_and_again_is_reported() -> None:
    sequences = SyncedSequences()
    ((_, sequence),) = sequences.sync([request([5, 6])])
    sequence.service = 1
    for _ in range(LOST_IN_A_ROW):
        sequence.delta(request([5, 6]), 0.0)
        assert list(sequences.lose(1, [1, 99])) == []
        assert sequence.sent == 0
    sequence.delta(request([5, 6]), 0.0)
    assert list(sequences.lose(0, [1])) == [], "the answer came from another service"
    assert list(sequences.lose(1, [1])) == [1]
