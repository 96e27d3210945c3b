"""Real workers that are stopped, killed from outside, or load another model than the others: requests
continue with the same text, the server names the worker, and ends when it is asked to."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from streamserve.fleet.quarantine import MAX_KILLS
from streamserve.fleet.worker_process import STOP_SECONDS
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import SamplingParams
from tests.api.serving import until as eventually
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.events import await_event
from tests.pairs import answers, fleet, serving, until
from tests.processes import workers_below
from tests.serving import serving as served

W = "unified-0"
STUCK_AFTER = 2.0
DRAIN_SECONDS = 2.0
PARAMS = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=450, ignore_eos=True, logprobs=0)
REQUEST = [7, 8, 9, 10], PARAMS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("alive"))


class Held:
    """Workers that compute three steps, and then block in the fourth one until `let_go`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        program = str(Path(__file__).parent / "lifecycle_events")
        patch.setenv("PYTHONPATH", os.pathsep.join([program, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TEST_EVENT_FOLDER", str(folder))
        self._reached, self._resume = folder / "reached", folder / "resume"
        await_event(folder, 1, 4, "verified-before-commit")
        self.let_go()

    def hold(self) -> None:
        """Block the next worker that reaches its fourth step."""
        self._reached.unlink(missing_ok=True)
        self._resume.unlink(missing_ok=True)

    def let_go(self) -> None:
        self._resume.touch()

    @property
    def still(self) -> bool:
        """Return whether a worker is blocked."""
        return self._reached.exists()


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(tmp_path, monkeypatch)


async def test_a_stopped_worker_is_named_and_replaced_and_its_request_goes_on(
    checkpoint: Path, held: Held, record: Callable[..., None]
) -> None:
    """A stopped worker is named and replaced, and its request continues. It is stopped while it computes, and
    again while it is idle, before a request arrives."""
    async with serving(checkpoint, stuck_after=STUCK_AFTER) as llm:
        expected = await answers(llm, [REQUEST])
        details: list[str] = []
        noting = asyncio.create_task(note_health(llm, details))
        seconds = []
        for number, idle in enumerate((False, True), 1):
            details.clear()
            if idle:
                os.kill(llm.process_id(), signal.SIGSTOP)
            else:
                held.hold()
            asking = asyncio.create_task(answers(llm, [REQUEST]))
            if not idle:
                await until(lambda: held.still)
                os.kill(llm.process_id(), signal.SIGSTOP)
                held.let_go()
            stopped_at = time.monotonic()
            assert await asyncio.wait_for(asking, 120) == expected
            seconds.append(round(time.monotonic() - stopped_at, 2))
            assert fleet(llm).workers[W].incarnation > number
            assert any(W in detail and "it has not responded for" in detail for detail in details), details
        noting.cancel()
    record(stuck_after=STUCK_AFTER, seconds_until_answered=seconds)


async def note_health(llm: AsyncLLM, details: list[str]) -> None:
    while True:
        if not llm.health().ready:
            details.append(llm.health().detail)
        await asyncio.sleep(0.01)


async def test_a_request_survives_workers_that_are_killed_from_outside(checkpoint: Path, held: Held) -> None:
    """A request survives workers that are killed from outside, more often than a request that ends its
    workers would be retried."""
    numbers = [signal.SIGTERM] * 3 + [signal.SIGKILL] * (MAX_KILLS - 1)
    async with serving(checkpoint) as llm:
        expected = await answers(llm, [REQUEST])
        held.hold()
        asking = asyncio.create_task(answers(llm, [REQUEST]))
        for deaths, number in enumerate(numbers):
            await until(lambda: held.still)
            held.hold()
            os.kill(llm.process_id(), number)
            await until(lambda before=deaths: fleet(llm).supervisor.deaths > before)
            assert not asking.done()
        held.let_go()
        assert await asyncio.wait_for(asking, 120) == expected
        assert llm.incidents().deaths == len(numbers)
        assert not len(fleet(llm).quarantine)


async def test_a_worker_that_loads_another_model_is_not_used_until_it_fits_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    folder = tmp_path / "served"
    shutil.copytree(checkpoint, folder)
    weights, kept = folder / "model.safetensors", tmp_path / "kept"
    other = make_checkpoint(tmp_path / "other", seed=1) / "model.safetensors"
    async with serving(folder, workers=2) as llm:
        expected = await answers(llm, [REQUEST])
        weights.rename(kept)
        other.rename(weights)
        os.kill(llm.process_id("unified-1"), signal.SIGKILL)
        changed = fleet(llm).workers["unified-1"]
        await until(lambda: changed.misfit and changed.recent_losses > 1)
        health = llm.health()
        assert (health.ready, health.detail) == (True, "ready"), "the other worker serves"
        assert health.missing.startswith(
            "worker unified-1 does not match the other workers and is not used ("
        )
        assert "is a different model than the other workers have loaded" in health.missing
        assert "restore the old ones, or restart the server" in health.missing
        assert await answers(llm, [REQUEST]) == expected
        weights.unlink()
        kept.rename(weights)
        await until(lambda: changed.ready is not None)
        assert llm.health().missing == ""
        await llm.drain("unified-0", True)
        assert await answers(llm, [REQUEST]) == expected


async def test_a_pair_of_which_one_half_loads_another_model_serves_it_together(
    tmp_path: Path, checkpoint: Path, scale: Scale
) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/fleet/test_pairs.py has it without processes")
    folder, other = tmp_path / "served", make_checkpoint(tmp_path / "other", seed=1)
    shutil.copytree(checkpoint, folder)
    async with serving(other) as llm:
        expected = await answers(llm, [REQUEST])
    async with serving(folder, pairs=1) as llm:
        before = await answers(llm, [REQUEST])
        (other / "model.safetensors").replace(folder / "model.safetensors")
        os.kill(llm.process_id("prefill-0"), signal.SIGKILL)
        await until(lambda: fleet(llm).workers["decode-0"].incarnation == 2)
        assert await answers(llm, [REQUEST]) == expected != before
        assert (llm.health().ready, llm.health().missing) == (True, "")


def test_a_signal_ends_the_server_also_while_a_worker_is_stopped(
    checkpoint: Path, held: Held, record: Callable[..., None]
) -> None:
    # A worker that is not forked reads the environment that lets it be blocked.
    settings = ("--threads", "1", "--no-profile", "--no-fork-workers", "--drain-timeout", str(DRAIN_SECONDS))
    with served(str(checkpoint), *settings) as server:
        (worker,) = workers_below(server.process.pid)
        held.hold()
        body = {"prompt": [7, 8, 9], "max_tokens": 450, "n": 4, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            eventually(lambda: held.still)
            worker.suspend()
            signalled_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert server.process.wait(60) == 0
        seconds = time.monotonic() - signalled_at
        assert "shutting down" in text
        assert DRAIN_SECONDS <= seconds < DRAIN_SECONDS + STOP_SECONDS, (
            "the server does not wait for the stopped worker"
        )
        assert not worker.is_running()
    record(drain_seconds=DRAIN_SECONDS, ended_after=round(seconds, 2))
