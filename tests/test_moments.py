"""Real workers, killed or stopped at a named moment of a request's life: at each of them with --full;
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
from tests.test_pairs import NUMBERS, Request, answers, empty, fleet, requests, serving, until

ROUNDS, STREAMS = 5, 16
ALWAYS = (
    ("verified-before-commit", ("decode-0",), signal.SIGKILL),
    ("first chunk", ("prefill-0",), signal.SIGSTOP),
)
"""What happens once without --full, too."""
GIVEN = {
    "draft": "self:1", "speculation_policy": "fixed:2", "num_blocks": 22, "max_model_len": 256,
    "eviction": "swap", "swap_space": 0.01, "stuck_after": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("moments"))


async def arriving(llm: AsyncLLM, number: int) -> list[int]:
    """A prompt that is edited while it arrives, and then answered."""
    rng = random.Random(number)
    params = SamplingParams(temperature=1.0, seed=number, max_tokens=20, ignore_eos=True)
    text = [rng.randrange(5, 200) for _ in range(60)]
    prompt = await llm.open(params, request_id=f"a{number}")
    await prompt.edit(text, 0)
    text = text[:20] + [rng.randrange(5, 200) for _ in range(30)]
    await prompt.edit(text, 0)
    tokens: list[int] = []
    async with aclosing(prompt.answer([*text, 7], params)) as news:
        async for item in news:
            tokens += item.tokens if isinstance(item, Delta) else ()
    return tokens


async def all_answers(llm: AsyncLLM, asked: list[Request]) -> list[object]:
    """Twelve requests, and four prompts that arrive."""
    return list(await asyncio.gather(answers(llm, asked), *(arriving(llm, number) for number in range(4))))


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, scale: Scale) -> tuple[list[Request], list[object]]:
    """What is asked, and what one worker answers that nobody disturbs."""

    async def ask() -> list[object]:
        async with serving(checkpoint, **GIVEN) as llm:
            return await all_answers(llm, asked)

    asked = requests(12, scale.seed)
    return asked, asyncio.run(ask())


@pytest.mark.parametrize("signals", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(
    "victims", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")], ids=["prefill", "decode", "both"]
)
@pytest.mark.parametrize("moment", [*get_args(LifecycleEvent), "draining"])
async def test_a_worker_lost_at_a_moment_costs_time_never_text(
    moment: str,
    victims: tuple[str, ...],
    signals: signal.Signals,
    checkpoint: Path,
    undisturbed: tuple[list[Request], list[object]],
    tmp_path: Path,
    scale: Scale,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., None],
) -> None:
    """A pair that is draining comes, like any other, to the moments of what it still has."""
    if not scale.full and (moment, victims, signals) not in ALWAYS:
        pytest.skip("with --full")
    rounds = ROUNDS if scale.full else 1
    asked, expected = undisturbed
    draining = moment == "draining"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "moments"), _path()]))
    monkeypatch.setenv("TEST_MOMENT", "finishing" if draining else moment)
    monkeypatch.setenv("TEST_MOMENT_FOLDER", str(tmp_path))
    here, go, number = tmp_path / "here", tmp_path / "go", tmp_path / "number"
    recovered = []
    go.touch()
    async with serving(checkpoint, pairs=1, **GIVEN) as llm:
        await llm.check_grammar(NUMBERS, "grammar")  # so that all can be asked for at once
        for attempt in range(1, 1 + rounds):
            here.unlink(missing_ok=True)
            go.unlink()
            number.write_text(f"{attempt} {1 + attempt % 3}")
            working = asyncio.create_task(all_answers(llm, asked))
            await until(here.exists)
            if draining:  # with all that was asked for before it
                await llm.rest(victims[0], True)
            before = {victim: fleet(llm).workers[victim].incarnation for victim in victims}
            for victim in victims:
                os.kill(llm.process_id(victim), signals)
            lost_at = time.monotonic()
            go.touch()
            assert await asyncio.wait_for(working, 120) == expected
            for victim in victims:
                await until(lambda v=victim, b=before: fleet(llm).workers[v].incarnation == b[v] + 1)
                assert fleet(llm).workers[victim].draining == (draining and victim == victims[0])
            if draining:
                await llm.rest(victims[0], False)
            await until(lambda: llm.health().ready)
            recovered.append(round(time.monotonic() - lost_at, 2))
            await empty(llm)
    record(rounds=rounds, streams=STREAMS, recovery_seconds=recovered)


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")
