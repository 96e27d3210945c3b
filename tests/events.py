"""Requests and prompt streams that are served while workers fail at lifecycle events."""

import asyncio
import random
import time
from contextlib import aclosing
from pathlib import Path

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta
from tests.pairs import Request, answers, serving, until

SETTINGS = {
    "draft": "self:1", "speculation_policy": "fixed:2", "num_blocks": 22, "max_model_len": 256,
    "eviction": "swap", "swap_space": 0.01, "stuck_after": 4.0,
}  # fmt: skip


def await_event(folder: Path, number: int, count: int, event: str) -> None:
    """Let one worker wait at its next `count`-th `event`, in the round `number`
    (lifecycle_events/sitecustomize.py). The file is replaced atomically, because workers read it at each
    event."""
    part = folder / "round.part"
    part.write_text(f"{number} {count} {event}", encoding="utf-8")
    part.replace(folder / "round")


async def answer_prompt_stream(llm: AsyncLLM, number: int) -> list[int]:
    """Return the answer to a prompt stream with one edit."""
    rng = random.Random(number)
    params = SamplingParams(temperature=1.0, seed=number, max_tokens=20, ignore_eos=True)
    text = [rng.randrange(5, 200) for _ in range(60)]
    prompt = await llm.open(params, request_id=f"a{number}")
    await prompt.edit(text, 0)
    text = text[:20] + [rng.randrange(5, 200) for _ in range(30)]
    await prompt.edit(text, 0)
    tokens: list[int] = []
    async with aclosing(prompt.answer([*text, 7], params)) as items:
        async for item in items:
            tokens += item.tokens if isinstance(item, ChoiceDelta) else ()
    return tokens


async def all_answers(llm: AsyncLLM, requests: list[Request]) -> list[object]:
    """Return the answers to the requests, and to four prompt streams."""
    return list(
        await asyncio.gather(
            answers(llm, requests), *(answer_prompt_stream(llm, number) for number in range(4))
        )
    )


async def undisturbed(checkpoint: Path, requests: list[Request]) -> list[object]:
    """Return the answers of a single worker without faults."""
    async with serving(checkpoint, **SETTINGS) as llm:
        return await all_answers(llm, requests)


async def send_until(
    reached: Path, llm: AsyncLLM, requests: list[Request], expected: list[object]
) -> "asyncio.Task[list[object]]":
    """Return a task that sends requests until they wait at the event. Requests that are answered without
    reaching it, which depends on when they arrive, are sent again."""
    deadline = time.monotonic() + 60
    while True:
        working = asyncio.create_task(all_answers(llm, requests))
        await until(lambda: working.done() or reached.exists())  # noqa: B023 (called here)
        if not working.done():
            return working
        assert working.result() == expected
        assert time.monotonic() < deadline
