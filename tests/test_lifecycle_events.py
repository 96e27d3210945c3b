"""Real workers that are killed or stopped at a lifecycle event of a request cost time, not text. All events
run with --full; tests/simulate tests them in virtual time."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from streamserve.engine.observer import LifecycleEvent
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.events import SETTINGS, await_event, send_until, undisturbed
from tests.pairs import NUMBERS, Request, fleet, make_requests, serving, until, wait_until_idle

ROUNDS, STREAMS = 2, 16
ALWAYS = (
    ("verified-before-commit", ("decode-0",), signal.SIGKILL),
    ("first chunk", ("prefill-0",), signal.SIGSTOP),
)
"""Cases that also run without --full, once."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("events"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path, scale: Scale) -> tuple[list[Request], list[object]]:
    """The requests, and the answers of a single worker without faults."""
    requests = make_requests(12, scale.seed)
    return requests, asyncio.run(undisturbed(checkpoint, requests))


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
    """A worker that is lost at an event costs time and never changes the text. A draining pair reaches the
    lifecycle events of its open requests."""
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
    reached, resume = tmp_path / "reached", tmp_path / "resume"
    recovered = []
    resume.touch()
    async with serving(checkpoint, pairs=1, **SETTINGS) as llm:
        await llm.check_grammar(NUMBERS, "grammar")  # so that all requests can be sent at the same time
        for attempt in range(1, 1 + rounds):
            reached.unlink(missing_ok=True)
            resume.unlink()
            await_event(tmp_path, attempt, 1 + attempt % 3, awaited)
            working = await send_until(reached, llm, requests, expected)
            if draining:  # included are the requests sent before
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
