"""Target servers with a draft service, and their requests and answers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.config import KVCacheDType
from streamserve.protocol.messages import Submit
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta, Usage
from tests.checkpoints import make_checkpoint
from tests.exact.speculating import Case, disturb, make_engine, run

Request = tuple[list[int], SamplingParams]


def make_target_and_draft(folder: Path) -> tuple[str, str]:
    """Write a target model, and a draft model with the target's weights plus noise; return their folders."""
    target, draft = (make_checkpoint(folder / name) for name in ("target", "draft"))
    disturb(draft, 0.03)
    return str(target), str(draft)


@contextlib.asynccontextmanager
async def targets(target: str, count: int, draft: str, **more: object) -> AsyncIterator[list[AsyncLLM]]:
    """Start this number of target servers, each with one worker process."""
    overrides = {
        "threads": 1, "profile": False, "num_blocks": 400, "draft": draft, "speculation_policy": "fixed:3",
        "log_level": "error", **more,
    }  # fmt: skip
    llms = [AsyncLLM(resolve(target, overrides)) for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*(llm.start() for llm in llms))
        for llm in llms:
            stack.push_async_callback(llm.close)
        yield llms


def make_requests(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    results = []
    for number in range(count):
        prompt = [rng.randrange(4, 300) for _ in range(rng.randint(2, 60))]
        temperature = 0.0 if number % 2 else 0.7
        penalty = rng.choice((0.0, 0.5))
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=48, ignore_eos=True, presence_penalty=penalty
        )
        results.append((prompt, params))
    return results


def local_texts(
    target: str, draft: str, workload: list[Request], kv_cache_dtype: KVCacheDType = "auto"
) -> tuple[list[list[int]], int]:
    """Return the texts and the number of accepted draft tokens of an engine in this process with a local
    draft model."""
    kind = "model" if draft != "none" else "none"
    case = Case(draft=kind, policy="fixed:3", kv_cache_dtype=kv_cache_dtype)
    engine = make_engine((Path(target), Path(draft)), case)
    submits = [Submit(str(n), *request, outputs={0: []}) for n, request in enumerate(workload)]
    texts = [[token.token for token in tokens] for tokens in run(engine, submits, 2).values()]
    engine.executor.close()
    return texts, engine.speculation.counters.accepted


async def answer(llm: AsyncLLM, request: Request, name: str) -> tuple[list[int], int]:
    """Return the tokens of a request's answer, and the number of accepted draft tokens."""
    tokens: list[int] = []
    accepted = 0
    async with aclosing(llm.submit(*request, request_id=name)) as items:
        async for item in items:
            if isinstance(item, ChoiceDelta):
                tokens += item.tokens
            elif isinstance(item, Usage):
                accepted = item.accepted_tokens
    return tokens, accepted


async def answers(llm: AsyncLLM, workload: list[Request], name: str) -> tuple[list[list[int]], int]:
    """Return the answers of all requests, sent two at a time."""
    results: list[tuple[list[int], int]] = []
    for start in range(0, len(workload), 2):
        part = workload[start : start + 2]
        results += await asyncio.gather(
            *(answer(llm, request, f"{name}-{start + n}") for n, request in enumerate(part))
        )
    return [tokens for tokens, _ in results], sum(accepted for _, accepted in results)


async def all_answers(llms: list[AsyncLLM], workload: list[Request], name: str) -> tuple[list, list[int]]:
    results = await asyncio.gather(*(answers(llm, workload, f"{name}-{n}") for n, llm in enumerate(llms)))
    return [texts for texts, _ in results], [accepted for _, accepted in results]
