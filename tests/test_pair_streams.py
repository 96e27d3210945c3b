"""Prompt streams on a stream pair of real workers are pushed while they arrive, and the text is the same."""

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import PromptChanged
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta
from tests.checkpoints import make_checkpoint
from tests.pairs import fleet, serving, until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pair_streams"))


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    async with aclosing(llm.submit(prompt, params, request_id=f"plain{params.seed}")) as items:
        async for item in items:
            tokens += item.tokens if isinstance(item, ChoiceDelta) else []
    return tokens


async def stream(
    llm: AsyncLLM, parts: list[list[int]], tail: list[int], params: SamplingParams, early: bool
) -> list[int]:
    """Send the parts one by one, each after the previous one is computed and pushed; return the answer."""
    name, transfers = f"stream{params.seed}", fleet(llm).transfers
    opened = await llm.open(params, request_id=name, answer_early=early)
    try:
        prompt: list[int] = []
        for part in parts:
            prompt = prompt + part
            pushed = transfers.pushes.landed
            await opened.edit(prompt + tail, 0 if early else len(tail))
            if early:
                await until(lambda: any(fleet(llm).requests[name].outputs.values()))
            else:
                await until(lambda pushed=pushed: transfers.pushes.landed > pushed)
        if early:
            await opened.finish()
        tokens: list[int] = []
        while True:
            try:
                async for item in opened.answer(prompt + tail, llm.complete(prompt + tail, params)):
                    tokens += item.tokens if isinstance(item, ChoiceDelta) else []
                return tokens
            except PromptChanged:
                tokens = []
    finally:
        await opened.close()


async def test_prompt_streams_on_a_pair_are_pushed_while_they_arrive(checkpoint: Path) -> None:
    rng = random.Random(0)
    parts = [[rng.randrange(5, 200) for _ in range(80)] for _ in range(3)]
    tail = [rng.randrange(5, 200) for _ in range(9)]
    slo = Slo(ttft_ms=60_000, tpot_ms=5_000)
    async with serving(checkpoint, pairs=1, draft="ngram") as llm:
        for seed, early in enumerate((False, True)):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True, slo=slo)
            streamed = await asyncio.wait_for(stream(llm, parts, tail, params, early), 60)
            assert streamed == await answer(llm, [token for part in parts for token in part] + tail, params)
            assert len(streamed) == 24
        decode = fleet(llm).workers["decode-0"]
        await until(lambda: decode.report is not None and decode.report.generation_tokens >= 2 * 23)
        prefill = fleet(llm).workers["prefill-0"].report
        assert prefill is not None
        assert prefill.transfer is not None
        assert prefill.transfer.arriving_bytes > prefill.transfer.sent_bytes / 4


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        ("classes:20=1,other=1", "2 decode workers, but there are 3"),
        ("classes:20=3", "classes take ends"),
        ("classes:20=0,other=3", "classes take ends"),
    ],
)
def test_class_sizes_that_do_not_fit_are_refused(checkpoint: Path, router: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        resolve(str(checkpoint), {"prefill": 1, "decode": 3, "router": router})
    resolve(str(checkpoint), {"prefill": 1, "decode": 3, "router": "classes:20=2,other=1"})
