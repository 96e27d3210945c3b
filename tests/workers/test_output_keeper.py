"""A worker stores the outputs of requests with an idempotency key."""

from streamserve.protocol.messages import (
    Cancel,
    Events,
    Finished,
    KeptToken,
    LikelyToken,
    Submit,
    Token,
    decode_from_worker,
    encode,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import Join
from streamserve.workers.output_keeper import MAX_IN_MESSAGE, OutputKeeper

DIGEST = b"d" * 16
PARAMS = SamplingParams(seed=1, max_tokens=9)


def submit(request: str = "r", digest: bytes = DIGEST, outputs: dict[int, list[int]] | None = None) -> Submit:
    return Submit(request, [1, 2], PARAMS, attempt=1, outputs=outputs or {0: []}, keep=digest)


def kept(keeper: OutputKeeper) -> dict[bytes, dict[int, list[KeptToken]]]:
    return {output.digest: output.choices for message in keeper.messages("m") for output in message.outputs}


def test_tokens_are_kept_with_their_log_probabilities_until_a_request_is_cancelled() -> None:
    keeper = OutputKeeper()
    keeper.apply(submit())
    keeper.apply(submit("without", b""))
    top = [LikelyToken(5, -0.1)]
    keeper.sent([Token("r", 1, 0, 0, 5, -0.1, top), Token("without", 1, 0, 0, 9)])
    keeper.sent([Token("r", 1, 0, 1, 6, -0.2, finish="stop")])
    assert kept(keeper) == {DIGEST: {0: [KeptToken(5, -0.1, top), KeptToken(6, -0.2, finish="stop")]}}
    keeper.apply(Cancel("r"))
    assert not kept(keeper)


def test_what_the_client_has_from_another_worker_comes_first() -> None:
    keeper = OutputKeeper()
    keeper.apply(submit(outputs={0: [3], 1: []}))
    keeper.apply(Join("r", 1, "id", {0: [3, 4], 1: [8]}, {}))
    keeper.sent([Token("r", 1, 1, 1, 9, -0.3), Token("r", 1, 0, 2, 5), Token("r", 1, 0, 2, 5)])
    assert kept(keeper)[DIGEST] == {
        0: [KeptToken(3), KeptToken(4), KeptToken(5)],
        1: [KeptToken(8), KeptToken(9, -0.3)],
    }


def test_a_next_attempt_keeps_the_log_probabilities_that_are_known() -> None:
    keeper = OutputKeeper()
    keeper.apply(submit())
    keeper.sent([Token("r", 1, 0, 0, 5, -0.1)])
    keeper.apply(submit(outputs={0: [5]}))
    assert kept(keeper)[DIGEST] == {0: [KeptToken(5, -0.1)]}
    keeper.apply(submit(outputs={0: [5, 6]}))
    assert kept(keeper)[DIGEST] == {0: [KeptToken(5), KeptToken(6)]}


def test_another_request_of_the_same_name_gets_nothing_of_it() -> None:
    """Another request with the same name gets none of the stored outputs. Names of two heads can be equal,
    and equal tokens after another prompt have other log-probabilities."""
    keeper = OutputKeeper()
    keeper.apply(submit())
    keeper.sent([Token("r", 1, 0, 0, 5, -0.1)])
    keeper.apply(submit(digest=b"e" * 16, outputs={0: [5]}))
    assert kept(keeper) == {b"e" * 16: {0: [KeptToken(5)]}}


def test_requests_that_failed_are_forgotten_and_the_oldest_beyond_the_limits() -> None:
    keeper = OutputKeeper(max_requests=2)
    for number in range(3):
        keeper.apply(submit(f"r{number}", bytes([number]) * 16))
    assert set(kept(keeper)) == {b"\1" * 16, b"\2" * 16}
    keeper.sent([Finished("r1", 1, 0, "error", "no")])
    assert set(kept(keeper)) == {b"\2" * 16}
    small = OutputKeeper(max_bytes=100)
    small.apply(submit())
    small.sent([Token("r", 1, 0, n, n) for n in range(10)])
    assert not len(small), "the whole output exceeds the limit"


def test_messages_are_bounded_and_can_be_decoded() -> None:
    keeper = OutputKeeper()
    for number in range(MAX_IN_MESSAGE + 1):
        keeper.apply(submit(f"r{number}", number.to_bytes(16, "big")))
    messages = list(keeper.messages("m"))
    assert [len(message.outputs) for message in messages] == [MAX_IN_MESSAGE, 1]
    assert decode_from_worker(encode(messages[0])) == messages[0]
    assert not list(OutputKeeper().messages("m"))
    assert decode_from_worker(encode(Events([]))) == Events([])
