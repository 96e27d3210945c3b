"""Limits on the log-probabilities of a reply, and their charge in memory."""

from collections.abc import Iterator, Sequence

import msgspec

from streamserve.api.http.memory import Charge, MemoryAccount
from streamserve.api.openai.reply_size import TEXT_BYTES, TOKEN_BYTES
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import PromptLogprob
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta

MAX_SCORES = 1 << 19
"""Maximum number of output log-probabilities in one reply without streaming. A stream may have more."""

MAX_PROMPT_SCORES = 1 << 20
"""Maximum number of prompt log-probabilities of one request, summed over all choices that include them."""

SCORE_BYTES = 320
"""Bytes of an output log-probability until its reply is written (measured)."""

PROMPT_SCORE_BYTES = 176
"""Bytes of a prompt log-probability until its reply is written: as received from the worker, packed, and
twice as JSON."""


def output_scores(params: Sequence[SamplingParams], prompts: Sequence[int], max_model_len: int) -> int:
    """Return the maximum number of output log-probabilities.

    `prompts` are the lengths of the prompts in tokens: each output can fill the rest of `max_model_len`.
    """
    scores = 0
    for each, length in zip(params, prompts, strict=True):
        if each.logprobs is not None:
            remaining = max(max_model_len - length, 0)
            tokens = remaining if each.max_tokens is None else min(each.max_tokens, remaining)
            scores += each.n * tokens * (each.logprobs + 1)
    return scores


def prompt_scores(params: Sequence[SamplingParams], prompts: Sequence[int]) -> int:
    """Return the number of prompt log-probabilities over all choices."""
    return sum(
        each.n * length * (each.prompt_logprobs + 1)
        for each, length in zip(params, prompts, strict=True)
        if each.prompt_logprobs is not None
    )


def check_scores(
    params: Sequence[SamplingParams], prompts: Sequence[int], max_model_len: int, whole: bool
) -> None:
    """Raise RequestError if a reply would have too many log-probabilities. A reply is streamed unless
    `whole`."""
    of_prompts = prompt_scores(params, prompts)
    if of_prompts > MAX_PROMPT_SCORES:
        raise RequestError(
            f"prompt_logprobs would fill the reply with {of_prompts} values, and {MAX_PROMPT_SCORES} is the "
            "limit: request fewer prompts, choices or alternatives",
            field="prompt_logprobs",
        )
    of_outputs = output_scores(params, prompts, max_model_len) if whole else 0
    if of_outputs > MAX_SCORES:
        raise RequestError(
            f"logprobs would fill the reply with up to {of_outputs} values, and {MAX_SCORES} is the limit: "
            "request a stream, or fewer tokens, choices or alternatives",
            field="logprobs",
        )


def reply_charge(
    account: MemoryAccount,
    params: Sequence[SamplingParams],
    prompts: Sequence[int],
    max_model_len: int,
    whole: bool,
) -> Charge:
    """Return a charge for the log-probabilities of a reply; the log-probabilities of prompts are charged
    already.

    Use it as a context manager. Raises RequestError if there are too many, or no memory for them now.
    """
    check_scores(params, prompts, max_model_len, whole)
    charge = account.charge()
    charge.add(PROMPT_SCORE_BYTES * prompt_scores(params, prompts))
    return charge


def charge_delta(charge: Charge, delta: ChoiceDelta) -> None:
    """Charge the parts of `delta` that are kept. Raises RequestError if there is no memory for them."""
    scores = sum(1 + len(entry.top) for entry in delta.logprobs)
    charge.add(TEXT_BYTES * len(delta.text) + TOKEN_BYTES * len(delta.tokens) + SCORE_BYTES * scores)


_PACKER = msgspec.msgpack.Encoder()
_UNPACKER = msgspec.msgpack.Decoder(list[PromptLogprob])


class PromptScores:
    """The log-probabilities of a prompt's tokens, except the first. They are stored packed: as objects, they
    would take ten times the memory. Iteration decodes them a few at a time."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []

    def append(self, entries: list[PromptLogprob]) -> None:
        """Append the next entries."""
        self._packed.append(_PACKER.encode(entries))

    def __iter__(self) -> Iterator[PromptLogprob]:
        for packed in self._packed:
            yield from _UNPACKER.decode(packed)
