"""Everything at once on stream pairs: greedy and seeded, guessed for, with grammars, stops and edits, on
either transport and in either precision, the text is what one worker gives without any of it."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.test_moments import arriving
from tests.test_pairs import NEEDS_NIXL, Request, empty, requests, serving, until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixed"))


def mixed(count: int, seed: int) -> list[Request]:
    """Every fifth request has a grammar, of the others every seventh stops at a string."""
    made = []
    for number, (prompt, params) in enumerate(requests(count, seed)):
        if number % 7 == 0 and params.grammar is None:
            params = msgspec.structs.replace(params, stop=("e", "th"), max_tokens=60)
        made.append((prompt, params))
    return made


async def texts(llm: AsyncLLM, asked: list[Request], edited: int) -> list[object]:
    """What everybody gets, all at once: tokens and text of each choice."""

    async def one(number: int, prompt: list[int], params: SamplingParams) -> dict[int, object]:
        tokens: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
        text = dict.fromkeys(tokens, "")
        async with aclosing(llm.submit(prompt, params, request_id=f"m{number}")) as news:
            async for item in news:
                if isinstance(item, Delta):
                    tokens[item.choice] += item.tokens
                    text[item.choice] += item.text
        return {choice: (tokens[choice], text[choice]) for choice in tokens}

    plain = [one(number, *request) for number, request in enumerate(asked)]
    return list(await asyncio.gather(*plain, *(arriving(llm, number) for number in range(edited))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=NEEDS_NIXL)])
async def test_everything_at_once_gives_the_text_of_one_worker(
    checkpoint: Path, scale: Scale, transport: str, dtype: str, record: Callable[..., None]
) -> None:
    if not scale.full and (transport, dtype) != ("shm", "bfloat16"):
        pytest.skip("with --full")
    count = scale.pick(24, 320)
    asked, edited = mixed(count, scale.seed), count // 6
    async with serving(checkpoint, dtype=dtype, draft="none") as llm:
        expected = await texts(llm, asked, edited)
        await until(lambda: (report := llm.report()) is not None and report.generation_tokens > count)
        await empty(llm)
    guessing = {"draft": str(checkpoint), "speculation_policy": "fixed:2"}
    async with serving(checkpoint, dtype=dtype, pairs=1, kv_transport=transport, **guessing) as llm:
        assert await texts(llm, asked, edited) == expected
        await until(lambda: (report := llm.report()) is not None and report.generation_tokens > count)
        await empty(llm)
        report = llm.report()
        assert report
        assert report.speculation
        assert report.transfer
        assert report.speculation.accepted > 0
        assert report.transfer.sent_bytes > 0
        assert report.streams
        assert report.streams.chunks > edited
        record(
            requests=count + edited,
            accepted=report.speculation.accepted,
            transfer=msgspec.to_builtins(report.transfer),
        )
