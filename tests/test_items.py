"""A request's events are converted to the right items."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from streamserve.api.openai.logprobs import completion_logprobs
from streamserve.api.prompt import EncodedPrompt
from streamserve.fleet.runtime import FleetRuntime
from streamserve.llm.items import read_items
from streamserve.protocol.messages import Admitted, DraftVerified, Event, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import Stopwatch
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder, sentencepiece_folder


async def test_usage_ignores_queueing_and_cached_tokens_after_a_preemption(tmp_path: Path) -> None:
    async def steps() -> AsyncIterator[list[Event]]:
        yield [Admitted("r", 1, 0, cached=16, queued=0.25)]
        yield [Token("r", 1, 0, 0, 70)]
        yield [Admitted("r", 1, 0, cached=32, queued=4.0)]
        yield [Token("r", 1, 0, 1, 71, finish="length")]

    usage = await read_usage(steps(), SamplingParams(max_tokens=2), tmp_path)
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 2)
    assert (usage.cached_tokens, usage.queued_seconds) == (16, 0.25)


async def test_draft_tokens_after_a_stop_string_are_not_accepted_ones(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    ids = tokenizer.encode("abSTOPxyzw", add_special_tokens=False)
    assert len(ids) == 10, "one token for each character"

    async def steps() -> AsyncIterator[list[Event]]:
        yield [Token("r", 1, 0, 0, ids[0])]
        tokens = [Token("r", 1, 0, index, ids[index]) for index in range(1, 10)]
        yield [DraftVerified("r", 1, 0, drafted=2, accepted=1), *tokens[:2]]
        yield [DraftVerified("r", 1, 0, drafted=8, accepted=6), *tokens[2:]]
        yield [DraftVerified("r", 1, 0, drafted=4, accepted=4)]

    params = SamplingParams(max_tokens=20, stop=("STOP",))
    usage = await read_usage(steps(), params, tmp_path)
    assert usage.completion_tokens == 6
    assert usage.accepted_tokens == 1 + 3, "S, T and O of the second step are delivered, and P ends the text"
    assert usage.drafted_tokens == 10


async def test_a_completion_of_a_sentencepiece_model_keeps_its_first_space(tmp_path: Path) -> None:
    """A completion of a SentencePiece model keeps its first space, in the text and in the offsets of
    log-probabilities: each token is at its offset in prompt and text."""
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(tmp_path))
    prompt = EncodedPrompt(tokenizer.encode("hello,"), "hello,")
    ids = tokenizer.encode("world, hello", add_special_tokens=False)

    async def steps() -> AsyncIterator[list[Event]]:
        last = len(ids) - 1
        for index, token in enumerate(ids):
            finish = "length" if index == last else None
            yield [Token("r", 1, 0, index, token, logprob=-1.0, finish=finish)]

    params = SamplingParams(max_tokens=len(ids), logprobs=0)
    runtime, stopwatch = cast(FleetRuntime, FakeRuntime()), Stopwatch(time.monotonic())
    items = read_items(steps(), runtime, tokenizer, "r", prompt.ids, params, stopwatch)
    deltas = [item async for item in items if isinstance(item, ChoiceDelta)]
    whole = prompt.echo(tokenizer, False) + "".join(delta.text for delta in deltas)
    assert whole == "hello, world, hello"
    table = completion_logprobs([entry for delta in deltas for entry in delta.logprobs], len("hello,"))
    offsets = [*prompt.offsets(tokenizer, False), *table.text_offset]
    texts = [tokenizer.token_text(token) for token in [*prompt.ids, *ids]]
    for offset, token in list(zip(offsets, texts, strict=True))[2:]:
        assert whole.startswith(token, offset)


class FakeRuntime:
    """A runtime that records cancellations."""

    async def cancel(self, request: str, choice: int) -> None:
        pass


async def read_usage(steps: AsyncIterator[list[Event]], params: SamplingParams, folder: Path) -> Usage:
    runtime = cast(FleetRuntime, FakeRuntime())
    tokenizer = Tokenizer.from_folder(byte_level_folder(folder))
    stopwatch = Stopwatch(time.monotonic())
    items = [item async for item in read_items(steps, runtime, tokenizer, "r", [0] * 40, params, stopwatch)]
    usage = items[-1]
    assert isinstance(usage, Usage)
    return usage
