"""Serve stream pairs of real workers, and compare the answers to requests."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from streamserve.fleet.fleet import Fleet
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.system.nixl import NIXL_MISSING, nixl_package
from streamserve.text.output import ChoiceDelta, Usage
from tests.reports import newer_reports

NEEDS_NIXL = pytest.mark.skipif(nixl_package() is None, reason=NIXL_MISSING)

NUMBERS = Grammar(kind="regex", text="[0-9]{2,6}(,[0-9]{2,6}){0,5}")
Request = tuple[list[int], SamplingParams]
Answers = list[dict[int, list[tuple[int, float]]]]
OneWorkers = Callable[[list[Request]], Awaitable[Answers]]


@contextlib.asynccontextmanager
async def serving(checkpoint: Path, **settings: object) -> AsyncGenerator[AsyncLLM, None]:
    settings = {"threads": 1, "profile": False, "num_blocks": 400, "max_chunk": 32} | settings
    llm = AsyncLLM(resolve(str(checkpoint), settings))
    await llm.start()
    try:
        await until(lambda: all(worker.ready for worker in fleet(llm).workers.values()))
        yield llm
    finally:
        await llm.close()


def fleet(llm: AsyncLLM) -> Fleet:
    return llm._runtime.fleet


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def make_requests(count: int, seed: int) -> list[Request]:
    """Return short and long prompts, some with a common prefix, greedy and sampled, with one or several
    choices, with and without a grammar."""
    rng = random.Random(seed)
    shared_prefix = [rng.randrange(5, 200) for _ in range(48)]
    result = []
    for number in range(count):
        suffix = [rng.randrange(5, 200) for _ in range(rng.randint(1, 120))]
        prompt = shared_prefix + suffix if number % 3 == 0 else suffix
        result.append(
            (
                prompt,
                SamplingParams(
                    temperature=rng.choice((0.0, 1.0)), seed=number, n=rng.choice((1, 1, 3)),
                    max_tokens=rng.choice((1, 2, 24, 60)), ignore_eos=number % 2 == 0, logprobs=2,
                    frequency_penalty=rng.choice((0.0, 0.5)),
                    grammar=NUMBERS if number % 5 == 4 else None,
                ),
            )
        )  # fmt: skip
    return result


async def answers(llm: AsyncLLM, requests: list[Request]) -> Answers:
    """Return token ids and log-probabilities of every choice; all requests run at once."""

    async def answer_one(number: int, prompt: list[int], params: SamplingParams) -> dict[int, list]:
        choices: dict[int, list] = {choice: [] for choice in range(params.n)}
        usage = None
        async with aclosing(llm.submit(prompt, params, request_id=f"r{number}")) as items:
            async for item in items:
                if isinstance(item, ChoiceDelta):
                    assert item.logprobs is not None
                    choices[item.choice] += [
                        (token, round(entry.logprob, 4))
                        for token, entry in zip(item.tokens, item.logprobs, strict=True)
                    ]
                elif isinstance(item, Usage):
                    usage = item
        assert usage is not None
        assert usage.prompt_tokens == len(prompt)
        assert usage.completion_tokens == sum(map(len, choices.values()))
        return choices

    return list(await asyncio.gather(*(answer_one(n, *request) for n, request in enumerate(requests))))


def asked_once(checkpoint: Path) -> OneWorkers:
    """Return a function that returns the answers of one worker, asked once for the same requests."""
    known: dict[str, Answers] = {}

    async def ask(requests: list[Request]) -> Answers:
        key = repr(requests)
        if key not in known:
            async with serving(checkpoint) as llm:
                known[key] = await answers(llm, requests)
        return known[key]

    return ask


async def wait_until_idle(llm: AsyncLLM) -> None:
    """Wait until no request, block or transfer reservation is in use, by reports sent after all requests."""
    state, reported = fleet(llm), newer_reports(llm)
    assert not state.requests

    def idle() -> bool:
        reports = [worker.report for worker in state.workers.values()]
        occupied = any(report is None or report.blocks_live for report in reports)
        return reported() and not occupied and not len(state.transfers.reservations)

    await until(idle)
