"""Real workers, killed or stopped at each named moment of a request's life, with --full; tests/simulate has
the same in virtual time."""

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

from streamserve.async_llm import AsyncLLM
from streamserve.engine.watch import Moment
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.test_pairs import Request, answers, empty, fleet, requests, serving, until

ROUNDS = 5
GIVEN = {
    "draft": "self:1", "speculation_policy": "fixed:2", "num_blocks": 60, "max_model_len": 256,
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


@pytest.mark.parametrize("signals", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(
    "victims", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")], ids=["prefill", "decode", "both"]
)
@pytest.mark.parametrize("moment", get_args(Moment))
async def test_a_worker_lost_at_a_moment_costs_time_never_text(
    moment: Moment,
    victims: tuple[str, ...],
    signals: signal.Signals,
    checkpoint: Path,
    tmp_path: Path,
    scale: Scale,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., None],
) -> None:
    if not scale.full:
        pytest.skip("with --full")
    asked = requests(12, scale.seed)
    async with serving(checkpoint, **GIVEN) as llm:
        expected = await all_answers(llm, asked)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "moments"), _path()]))
    monkeypatch.setenv("TEST_MOMENT", moment)
    monkeypatch.setenv("TEST_MOMENT_FOLDER", str(tmp_path))
    here, go = tmp_path / "here", tmp_path / "go"
    recovered = []
    for number in range(1, 1 + ROUNDS):
        monkeypatch.setenv("TEST_MOMENT_NUMBER", str(number))
        go.unlink(missing_ok=True)
        here.unlink(missing_ok=True)
        async with serving(checkpoint, pairs=1, **GIVEN) as llm:
            working = asyncio.create_task(all_answers(llm, asked))
            await until(here.exists)
            for victim in victims:
                os.kill(llm.process_id(victim), signals)
            lost_at = time.monotonic()
            go.touch()
            assert await working == expected
            state = fleet(llm)
            await until(lambda s=state: all(s.workers[victim].incarnation == 2 for victim in victims))
            await until(lambda served=llm: served.health().ready)
            recovered.append(round(time.monotonic() - lost_at, 2))
            await empty(llm)
    record(rounds=ROUNDS, streams=16, recovery_seconds=recovered)


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")
