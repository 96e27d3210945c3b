"""The items that a request's events are converted to."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from streamserve.fleet.runtime import FleetRuntime
from streamserve.llm.items import read_items
from streamserve.protocol.messages import Admitted, Event, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import Stopwatch
from streamserve.text.output import Usage
from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder


async def test_usage_ignores_queueing_and_cached_tokens_after_a_preemption(tmp_path: Path) -> None:
    async def steps() -> AsyncIterator[list[Event]]:
        yield [Admitted("r", 1, 0, cached=16, queued=0.25)]
        yield [Token("r", 1, 0, 0, 70)]
        yield [Admitted("r", 1, 0, cached=32, queued=4.0)]
        yield [Token("r", 1, 0, 1, 71, finish="length")]

    params = SamplingParams(max_tokens=2)
    runtime = cast(FleetRuntime, None)  # only used to end a choice at its stop string
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    stopwatch = Stopwatch(time.monotonic())
    items = [item async for item in read_items(steps(), runtime, tokenizer, "r", 40, params, stopwatch)]
    usage = items[-1]
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 2)
    assert (usage.cached_tokens, usage.queued_seconds) == (16, 0.25)
