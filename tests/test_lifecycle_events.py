"""Real workers, killed or stopped at a lifecycle event of a request: at each event with --full;
tests/simulate has the same in virtual time."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import get_args

import pytest

from streamserve.engine.observer import LifecycleEvent
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.test_pairs import NUMBERS, Request, answers, fleet, make_requests, serving, until, wait_until_idle

ROUNDS, STREAMS = 2, 16
ALWAYS = (
    ("verified-before-commit", ("decode-0",), signal.SIGKILL),
    ("first chunk", ("prefill-0",), signal.SIGSTOP),
)
"""Cases that also run without --full, once."""
SETTINGS = {
    "draft": "self:1", "speculation_policy": "fixed:2", "num_blocks": 22, "max_model_len": 256,
    "eviction": "swap", "swap_space": 0.01, "stuck_after": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("events"))


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
            tokens += item.tokens if isinstance(item, Delta) else ()
    return tokens


async def all_answers(llm: AsyncLLM, requests: list[Request]) -> list[object]:
    """Return the answers to the requests, and to four prompt streams."""
    return list(
        await asyncio.gather(
            answers(llm, requests), *(answer_prompt_stream(llm, number) for number in range(4))
        )
    )


async def undisturbed(checkpoint: Path, requests: list[Request]) -> list[object]:
    """Return the answers of one worker without faults."""
    async with serving(checkpoint, **SETTINGS) as llm:
        return await all_answers(llm, requests)


@pytest.fixture(scope="module")
def reference(checkpoint: Path, scale: Scale) -> tuple[list[Request], list[object]]:
    """The requests, and the answers of one worker without faults."""
    requests = make_requests(12, scale.seed)
    return requests, asyncio.run(undisturbed(checkpoint, requests))


async def send_until(
    reached: Path, llm: AsyncLLM, requests: list[Request], expected: list[object]
) -> "asyncio.Task[list[object]]":
    """Return the task of the requests that wait at the event. Whether they reach it depends on when they
    arrive: those that are answered without it are sent again."""
    deadline = time.monotonic() + 60
    while True:
        working = asyncio.create_task(all_answers(llm, requests))
        await until(lambda: working.done() or reached.exists())  # noqa: B023 (called here)
        if not working.done():
            return working
        assert working.result() == expected
        assert time.monotonic() < deadline


@pytest.mark.parametrize("signals", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(
    "victims", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")], ids=["prefill", "decode", "both"]
)
@pytest.mark.parametrize("event", [*get_args(LifecycleEvent), "draining"])
async def test_a_worker_lost_at_an_event_costs_time_never_text(
    event: str,
    victims: tuple[str, ...],
    signals: signal.Signals,
    checkpoint: Path,
    reference: tuple[list[Request], list[object]],
    tmp_path: Path,
    scale: Scale,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., None],
) -> None:
    """A draining pair reaches the lifecycle events of its open requests."""
    if not scale.full and (event, victims, signals) not in ALWAYS:
        pytest.skip("with --full")
    rounds = ROUNDS if scale.full else 1
    requests, expected = reference
    draining = event == "draining"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "lifecycle_events"), _path()])
    )
    awaited = "finishing" if draining else event
    monkeypatch.setenv("TEST_EVENT_FOLDER", str(tmp_path))
    reached, resume, number = tmp_path / "reached", tmp_path / "resume", tmp_path / "round"
    recovered = []
    resume.touch()
    async with serving(checkpoint, pairs=1, **SETTINGS) as llm:
        await llm.check_grammar(NUMBERS, "grammar")  # so that all requests can be sent at once
        for attempt in range(1, 1 + rounds):
            reached.unlink(missing_ok=True)
            resume.unlink()
            number.write_text(f"{attempt} {1 + attempt % 3} {awaited}")
            working = await send_until(reached, llm, requests, expected)
            if draining:  # with the requests sent before
                await llm.drain(victims[0], True)
            before = {victim: fleet(llm).workers[victim].incarnation for victim in victims}
            for victim in victims:
                os.kill(llm.process_id(victim), signals)
            lost_at = time.monotonic()
            resume.touch()
            assert await asyncio.wait_for(working, 120) == expected
            for victim in victims:
                await until(lambda v=victim, b=before: fleet(llm).workers[v].incarnation == b[v] + 1)
                assert fleet(llm).workers[victim].draining == (draining and victim == victims[0])
            if draining:
                await llm.drain(victims[0], False)
            await until(lambda: llm.health().ready)
            recovered.append(round(time.monotonic() - lost_at, 2))
            await wait_until_idle(llm)
    record(rounds=rounds, streams=STREAMS, recovery_seconds=recovered)


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")
