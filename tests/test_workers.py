"""Several unified workers of one server, alone and with pairs, give the text of one worker, also when one
dies. Their weights are in memory once, and they serve prompt streams."""

import asyncio
import os
import re
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from streamserve import LLM
from streamserve.execution.backends.native.library import kernels
from streamserve.llm.async_llm import AsyncLLM, threads_of_worker
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.system.processors import usable_processors
from streamserve.text.output import ChoiceDelta, Usage
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.pairs import OneWorkers, answers, asked_once, fleet, make_requests, serving, until, wait_until_idle
from tests.serving import serving as served

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TABLE = {"vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 2048}
"""A vocabulary that makes a model of 40 MB, so that its weights are visible in the memory of a process."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
def one_workers(checkpoint: Path) -> OneWorkers:
    return asked_once(checkpoint)


async def answer(llm: AsyncLLM, prompt: list[int], name: str) -> tuple[list[int], int]:
    """Return a greedy answer, and the number of cached prompt tokens."""
    tokens, cached = [], 0
    async with aclosing(llm.submit(prompt, GREEDY, request_id=name)) as items:
        async for item in items:
            if isinstance(item, ChoiceDelta):
                tokens += item.tokens
            elif isinstance(item, Usage):
                cached = item.cached_tokens
    return tokens, cached


@pytest.mark.parametrize(
    "workers", [{"workers": 2}, {"workers": 1, "pairs": 1}, {"workers": 1, "prefill": 1, "decode": 2}]
)
async def test_workers_give_the_text_of_one(
    checkpoint: Path, one_workers: OneWorkers, scale: Scale, workers: dict[str, int]
) -> None:
    """Workers give the text of one worker, with speculation, greedy and sampled. A killed worker's requests
    continue on the others."""
    if not scale.full and "prefill" not in workers:
        pytest.skip("with --full; the case with a prefill and two decode workers has all roles too")
    requests = make_requests(scale.pick(16, 120), scale.seed)
    expected = await one_workers(requests)
    settings = {"draft": "ngram", "speculation_policy": "fixed:3", "router": "round-robin"}
    async with serving(checkpoint, **settings, **workers) as llm:
        assert await answers(llm, requests) == expected
        await wait_until_idle(llm)
        workers_of = fleet(llm).workers.values()  # each worker has computed something, by its next report
        await until(lambda: all(worker.report and worker.report.steps for worker in workers_of))
        report = llm.report()
        assert report
        assert report.speculation
        assert report.speculation.accepted > 0
        if "pairs" in workers or "prefill" in workers:
            assert report.transfer
            assert report.transfer.sent_bytes > 0

        working = asyncio.create_task(answers(llm, requests))
        await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
        os.kill(llm.process_id("unified-0"), signal.SIGKILL)
        assert await working == expected
        await until(lambda: fleet(llm).workers["unified-0"].incarnation == 2)
        await wait_until_idle(llm)


async def test_a_prefix_is_sent_where_it_is_cached_and_a_drained_worker_gets_nothing(
    checkpoint: Path,
) -> None:
    async with serving(checkpoint, workers=2) as llm:
        prompts = [[5 + number] * 64 for number in range(4)]
        first = await asyncio.gather(*(answer(llm, prompt, f"a{prompt[0]}") for prompt in prompts))
        await wait_until_idle(llm)
        chosen = {record.request: record for record in fleet(llm).placement.recent}
        assert len({record.candidates[record.decision.chosen] for record in chosen.values()}) == 2
        for prompt, (tokens, cached) in zip(prompts, first, strict=True):
            assert not cached
            assert await answer(llm, prompt, f"b{prompt[0]}") == (tokens, 48), (
                "all blocks of the prompt but the last"
            )
        view = llm.routing()
        assert [worker.name for worker in view.workers] == ["unified-0", "unified-1"]
        assert "cached_tokens" in repr(view.decisions[0])

        await llm.drain("unified-0", True)
        again = [await answer(llm, prompt, f"c{prompt[0]}") for prompt in prompts]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
        last = list(fleet(llm).placement.recent)[-4:]
        assert {record.candidates for record in last} == {("unified-1",)}
        await llm.drain("unified-0", False)


async def test_prompt_streams_live_on_one_worker_each(checkpoint: Path) -> None:
    """Prompt streams stay on one worker each: four streams on two workers. The text is that of the whole
    prompt, also after a worker's death."""
    prompts = [[7 + number, *range(10, 40)] for number in range(4)]
    async with serving(checkpoint, workers=2, router="least-loaded") as llm:
        expected = [await answer(llm, prompt, f"whole{prompt[0]}") for prompt in prompts]

        async def stream(number: int) -> list[int]:
            prompt, ids = await llm.open(GREEDY, request_id=f"s{number}"), prompts[number]
            try:
                for token in range(8, 32, 8):
                    await prompt.edit(ids[:token], 0)
                    await asyncio.sleep(0.05)
                    if number == 0 and token == 16:
                        os.kill(llm.process_id(fleet(llm).requests["s0"].worker or ""), signal.SIGKILL)
                items = prompt.answer(ids, llm.complete(ids, GREEDY))
                return [
                    token async for item in items if isinstance(item, ChoiceDelta) for token in item.tokens
                ]
            finally:
                await prompt.close()

        texts = await asyncio.gather(*(stream(number) for number in range(4)))
        assert texts == [tokens for tokens, _ in expected]
        assert fleet(llm).supervisor.deaths == 1
        await wait_until_idle(llm)


@pytest.mark.skipif(kernels() is None, reason="only the kernels' weights are shared")
@pytest.mark.parametrize("workers", [{"workers": 2, "router": "round-robin"}, {"pairs": 1}])
async def test_the_weights_are_in_memory_once(tmp_path: Path, scale: Scale, workers: dict[str, int]) -> None:
    """The weights are in memory once, also after the restart of the worker that wrote them, and with a draft
    model."""
    if not scale.full and "pairs" in workers:
        pytest.skip("with --full")
    folder = make_checkpoint(tmp_path, dtype="bfloat16", **TABLE)
    async with serving(
        folder, draft=str(folder), speculation_policy="fixed:2", num_blocks=16, **workers
    ) as llm:
        ready = llm.ready
        assert ready.weights_shared
        assert ready.draft
        names = list(fleet(llm).workers)
        for attempt in range(2):
            for number in range(4):
                await answer(llm, [90 + 10 * attempt + number, *range(5, 80)], f"{attempt}-{number}")
            files = [os.fstat(file.fileno()) for file in llm._runtime.driver.launcher._weights._files]
            copy = sum(file.st_blocks * 512 for file in files)
            assert copy >= 2 * ready.model.weight_bytes
            shared = [memory_of(llm.process_id(name), "memfd:streamserve[a-z-]*weights") for name in names]
            assert sum(pss for _, pss in shared) <= 1.01 * copy, "there is one copy of the weights"
            assert sum(rss for rss, _ in shared) > 1.2 * copy, "both workers use the copy"
            together = sum(memory_of(llm.process_id(name))[1] for name in names)
            assert together <= copy + len(names) * (ready.kv_cache_bytes + 250e6)
            os.kill(llm.process_id(names[0]), signal.SIGKILL)
            await until(lambda: not all(worker.ready for worker in fleet(llm).workers.values()))
            await until(lambda: all(worker.ready for worker in fleet(llm).workers.values()))


def memory_of(process: int, name: str = "") -> tuple[int, int]:
    """Return the bytes of a process's memory in areas of this name, and its share of them if an area is
    divided among all processes that map it."""
    areas = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{process}/smaps").read_text(encoding="utf-8"), flags=re.M
    )
    text = "".join(area for area in areas if re.search(name, area.partition("\n")[0]))
    resident, proportional = (
        sum(map(int, re.findall(rf"^{key}: +(\d+)", text, re.M))) for key in ("Rss", "Pss")
    )
    return resident * 1024, proportional * 1024


def test_the_banner_counts_the_weights_once(checkpoint: Path) -> None:
    size = ("--kv-cache-bytes", "8MB", "--threads", "1", "--no-profile")
    with served(str(checkpoint), "--workers", "2", *size) as server:
        numbers = re.search(
            r"memory +([\d.]+) MB weights, (\d+) MB KV .*, the KV cache in each of 2 workers: (\d+) MB",
            server.banner,
        )
        if kernels() is None:
            assert "in each of 2 workers" in server.banner
        else:
            assert numbers, server.banner
            weights, cache, together = map(float, numbers.groups())
            assert together == pytest.approx(weights + 2 * cache, abs=2)
        assert "2 threads" in server.banner


def test_a_script_uses_several_workers(checkpoint: Path) -> None:
    prompts = [[5 + number] * 20 for number in range(8)]
    texts = []
    for workers in (1, 2):
        with LLM(str(checkpoint), workers=workers, threads=1, profile=False, num_blocks=200) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
            assert len(llm._llm.routing().workers) == workers
    assert texts[0] == texts[1]


def test_workers_divide_the_processors() -> None:
    model, threads = ModelConfig(path=""), usable_processors().threads
    assert threads_of_worker(model, 1) == threads
    assert threads_of_worker(model, 2) == max(1, threads // 2)
