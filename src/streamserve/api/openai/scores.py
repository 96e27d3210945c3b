"""Log-probabilities of a reply: how many it may hold, and the memory they are charged."""

from collections.abc import Iterator, Sequence

import msgspec

from streamserve.api.http.memory import Charge, MemoryAccount
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import PromptLogprob
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta

MAX_SCORES = 1 << 19
"""Log-probabilities of the outputs that one whole reply may hold; a stream may have more."""

MAX_PROMPT_SCORES = 1 << 20
"""Log-probabilities of the prompts of one request, over all choices that show them."""

SCORE_BYTES = 320
"""What a log-probability of an output takes until its reply is written, in bytes (measured)."""

PROMPT_SCORE_BYTES = 176
"""The same of a prompt: as it came from the worker, packed, and twice as JSON."""


def output_scores(params: Sequence[SamplingParams], prompts: Sequence[int], context: int) -> int:
    """The most log-probabilities of outputs, after prompts of so many tokens: an output has at most as many
    tokens as the `context` leaves."""
    scores = 0
    for each, length in zip(params, prompts, strict=True):
        if each.logprobs is not None:
            left = max(context - length, 0)
            tokens = left if each.max_tokens is None else min(each.max_tokens, left)
            scores += each.n * tokens * (each.logprobs + 1)
    return scores


def prompt_scores(params: Sequence[SamplingParams], prompts: Sequence[int]) -> int:
    """How many log-probabilities of prompts the choices show."""
    return sum(
        each.n * length * (each.prompt_logprobs + 1)
        for each, length in zip(params, prompts, strict=True)
        if each.prompt_logprobs is not None
    )


def check_scores(params: Sequence[SamplingParams], prompts: Sequence[int], context: int, whole: bool) -> None:
    """Raises RequestError if a reply, in one piece if `whole`, would hold too many log-probabilities."""
    of_prompts = prompt_scores(params, prompts)
    if of_prompts > MAX_PROMPT_SCORES:
        raise RequestError(
            f"prompt_logprobs would fill the reply with {of_prompts} values, and {MAX_PROMPT_SCORES} is the "
            "limit: ask for fewer prompts, choices or alternatives",
            field="prompt_logprobs",
        )
    of_outputs = output_scores(params, prompts, context) if whole else 0
    if of_outputs > MAX_SCORES:
        raise RequestError(
            f"logprobs would fill the reply with up to {of_outputs} values, and {MAX_SCORES} is the limit: "
            "ask for a stream, or for fewer tokens, choices or alternatives",
            field="logprobs",
        )


def reply_charge(
    account: MemoryAccount,
    params: Sequence[SamplingParams],
    prompts: Sequence[int],
    context: int,
    whole: bool,
) -> Charge:
    """A charge for the log-probabilities of a reply, which has those of the prompts already: use it as a
    context manager. Raises RequestError if there are too many, or no memory for them now."""
    check_scores(params, prompts, context, whole)
    charge = account.charge()
    charge.add(PROMPT_SCORE_BYTES * prompt_scores(params, prompts))
    return charge


def charge_delta(charge: Charge, delta: Delta) -> None:
    """Charge what a reply keeps of `delta`. Raises RequestError if there is no memory for it."""
    if delta.logprobs:
        charge.add(SCORE_BYTES * sum(1 + len(entry.top) for entry in delta.logprobs))


_PACKER = msgspec.msgpack.Encoder()
_UNPACKER = msgspec.msgpack.Decoder(list[PromptLogprob])


class PromptScores:
    """The log-probabilities of a prompt's tokens but the first, kept packed: as objects they take ten times
    as much. Each pass over them makes the objects anew, a few at a time."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []

    def append(self, entries: list[PromptLogprob]) -> None:
        """Keep the next ones."""
        self._packed.append(_PACKER.encode(entries))

    def __iter__(self) -> Iterator[PromptLogprob]:
        for packed in self._packed:
            yield from _UNPACKER.decode(packed)
