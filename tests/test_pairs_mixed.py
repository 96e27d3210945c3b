"""With all features at once, stream pairs give the text of one worker without speculation: greedy and seeded
sampling, draft tokens, grammars, stop strings and edits, on both transports and in both precisions."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.events import answer_prompt_stream
from tests.pairs import NEEDS_NIXL, Request, make_requests, serving, until, wait_until_idle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixed"))


def mixed(count: int, seed: int) -> list[Request]:
    """Return requests of which every fifth has a grammar, and of the others every seventh a stop string."""
    result = []
    for number, (prompt, params) in enumerate(make_requests(count, seed)):
        if number % 7 == 0 and params.grammar is None:
            params = msgspec.structs.replace(params, stop=("e", "th"), max_tokens=60)
        result.append((prompt, params))
    return result


async def texts(llm: AsyncLLM, requests: list[Request], stream_count: int) -> list[object]:
    """Return tokens and text of each choice of all requests, sent at once."""

    async def answer_one(number: int, prompt: list[int], params: SamplingParams) -> dict[int, object]:
        tokens: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
        text = dict.fromkeys(tokens, "")
        async with aclosing(llm.submit(prompt, params, request_id=f"m{number}")) as items:
            async for item in items:
                if isinstance(item, ChoiceDelta):
                    tokens[item.choice] += item.tokens
                    text[item.choice] += item.text
        return {choice: (tokens[choice], text[choice]) for choice in tokens}

    plain = [answer_one(number, *request) for number, request in enumerate(requests)]
    return list(
        await asyncio.gather(*plain, *(answer_prompt_stream(llm, number) for number in range(stream_count)))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=NEEDS_NIXL)])
async def test_all_features_at_once_give_the_text_of_one_worker(
    checkpoint: Path, scale: Scale, transport: str, dtype: str, record: Callable[..., None]
) -> None:
    if not scale.full and (transport, dtype) != ("shm", "bfloat16"):
        pytest.skip("with --full")
    count = scale.pick(24, 120)
    requests, stream_count = mixed(count, scale.seed), count // 6
    async with serving(checkpoint, dtype=dtype, draft="none") as llm:
        expected = await texts(llm, requests, stream_count)
        await until(lambda: (report := llm.report()) is not None and report.generation_tokens > count)
        await wait_until_idle(llm)
    drafting_settings = {"draft": str(checkpoint), "speculation_policy": "fixed:2"}
    async with serving(checkpoint, dtype=dtype, pairs=1, kv_transport=transport, **drafting_settings) as llm:
        assert await texts(llm, requests, stream_count) == expected
        await until(lambda: (report := llm.report()) is not None and report.generation_tokens > count)
        await wait_until_idle(llm)
        report = llm.report()
        assert report
        assert report.speculation
        assert report.transfer
        assert report.speculation.accepted > 0
        assert report.transfer.sent_bytes > 0
        assert report.streams
        assert report.streams.chunks > stream_count
        record(
            requests=count + stream_count,
            accepted=report.speculation.accepted,
            transfer=msgspec.to_builtins(report.transfer),
        )
