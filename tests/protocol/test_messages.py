"""Messages are unchanged by encoding and decoding, and other bytes are refused."""

import msgspec
import pytest

from streamserve.protocol.messages import (
    Admitted,
    Cancel,
    Events,
    Failed,
    Finished,
    FromWorker,
    LikelyToken,
    PromptLogprob,
    PromptLogprobs,
    Stop,
    Submit,
    Token,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from streamserve.protocol.reports import Report  # fmt: skip
from streamserve.protocol.sampling import SamplingParams

PARAMS = SamplingParams(n=2, seed=2**64 - 1, logit_bias={3: -1.5}, stop=("a", "b"), logprobs=1)
TO_WORKER: list[ToWorker] = [
    Submit("r", [1, 2], PARAMS, attempt=3, outputs={0: [5], 1: []}, arrival=1.5, priority=-1, cache_salt="s"),
    Cancel("r", 1),
    Cancel("r"),
    Stop(),
]
FROM_WORKER: list[FromWorker] = [
    Failed("why", 2),
    Events([
        Admitted("r", 0, 0, 16),
        Token("r", 0, 0, 4, 77, -0.5, [LikelyToken(77, -0.5)], "stop"),
        PromptLogprobs("r", 0, 1, [PromptLogprob(3, -1.0, 2, [])]),
        Finished("r", 0, 1, "error", "why"),
    ]),
    Report(running=1, waiting=2, blocks_total=3, blocks_live=1, steps=4, prompt_tokens=5, generation_tokens=6,
           prefix_queries=7, prefix_hits=3, preemptions=0, copies_on_write=0, step_seconds=0.5),
]  # fmt: skip


@pytest.mark.parametrize("message", TO_WORKER)
def test_messages_to_a_worker_survive(message: ToWorker) -> None:
    assert decode_to_worker(encode(message)) == message


@pytest.mark.parametrize("message", FROM_WORKER)
def test_messages_from_a_worker_survive(message: FromWorker) -> None:
    assert decode_from_worker(encode(message)) == message


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Nothing"}), encode(Stop())]
)
def test_what_is_no_message_from_a_worker_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_from_worker(data)


def test_an_attempt_number_that_a_journal_cannot_hold_is_no_message() -> None:
    """An attempt number that a journal cannot hold is refused. A forged one once ended the worker that
    recorded it."""
    largest, beyond = (
        Submit("r", [1], PARAMS, attempt=number, outputs={0: []}, arrival=1.5)
        for number in (2**63 - 1, 2**63)
    )
    assert decode_to_worker(encode(largest)) == largest
    with pytest.raises(msgspec.DecodeError):
        decode_to_worker(encode(beyond))
