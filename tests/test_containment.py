"""A poison request that ends real workers in a phase of a step gets one error, and the other requests get
their text. tests/simulate/test_poison.py tests this in virtual time, with more cases."""

import asyncio
import contextlib
import json
import math
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from streamserve import LLM
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta
from tests.api.serving import served
from tests.api.serving import until as until_true
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.draft_service.network import drafting
from tests.pairs import fleet, serving, until, wait_until_idle

PHASES = ("prefill", "decode", "draft", "verify", "swap", "transfer")
READY_SECONDS = 10.0
"""Maximum seconds from the last death of a worker until the server is ready again."""
TRIES = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("containment"))


def inject(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str) -> None:
    """Inject a fault into the workers that start from now on, and store their crash reports in `folder`."""
    poison_folder = str(Path(__file__).parent / "poison")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([poison_folder, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TEST_FAULT", fault)
    monkeypatch.setenv("TEST_FAULT_DONE", str(folder / "done"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(5, 200) for _ in range(rng.randint(8, 40))] for _ in range(count)]


async def answer(llm: AsyncLLM, name: str, prompt: list[int], tokens: int = 16) -> list[int]:
    params = SamplingParams(temperature=1.0, seed=len(prompt), max_tokens=tokens, ignore_eos=True)
    tokens_received: list[int] = []
    async with aclosing(llm.submit(prompt, params, request_id=name)) as items:
        async for item in items:
            tokens_received += item.tokens if isinstance(item, ChoiceDelta) else ()
    return tokens_received


async def survive(llm: AsyncLLM, poison_name: str, count: int, tries: int = TRIES) -> dict[str, object]:
    """Send the same requests without and with a poison request; return the measurements."""
    prompt_list = prompts(count)
    started = time.monotonic()
    expected = await asyncio.gather(*(answer(llm, f"r{n}", prompt) for n, prompt in enumerate(prompt_list)))
    undisturbed_seconds = time.monotonic() - started
    fleet(llm).quarantine.max_tries = tries
    names = [poison_name if n == count // 3 else f"s{n}" for n in range(count)]
    latencies: list[float] = []

    async def timed_answer(name: str, prompt: list[int]) -> list[int]:
        started = time.monotonic()
        found = await answer(llm, name, prompt)
        latencies.append(time.monotonic() - started)
        return found

    deaths: list[float] = []
    death_watcher = asyncio.create_task(note_deaths(llm, deaths))
    calls = (timed_answer(name, prompt) for name, prompt in zip(names, prompt_list, strict=True))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: llm.health().ready)
    recovered = time.monotonic()
    death_watcher.cancel()
    await wait_until_idle(llm)
    assert not len(fleet(llm).quarantine)
    refused = []
    for name, found, text in zip(names, answers, expected, strict=True):
        if isinstance(found, BaseException):
            assert isinstance(found, RequestError), repr(found)
            assert (name, found.status) == (poison_name, 500)
            assert poison_name in found.message
            refused.append(found.message)
        else:
            assert found == text
    return {
        "streams": count,
        "deaths": len(deaths),
        "refused": refused,
        "ready_seconds_after_the_last_death": round(recovered - deaths[-1], 2) if deaths else 0.0,
        "calm_seconds": round(undisturbed_seconds, 2),
        "longest_wait_of_the_innocent": round(max(latencies, default=0.0), 2),
    }


async def note_deaths(llm: AsyncLLM, deaths: list[float]) -> None:
    """Append the times at which workers die."""
    known = fleet(llm).supervisor.deaths
    while True:
        now = fleet(llm).supervisor.deaths
        deaths += [time.monotonic()] * (now - known)
        known = now
        await asyncio.sleep(0.01)


async def test_a_step_that_raises_costs_one_request_and_leaves_a_report(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., None]
) -> None:
    inject(monkeypatch, tmp_path, "raise decode")
    async with serving(checkpoint) as llm:
        figures = await survive(llm, "poison", 2, tries=1)
        assert 1 < figures["deaths"] <= 3
        (message,) = figures["refused"]
        assert "ended its worker 1 times while it ran alone, in phase run" in message
        assert "IndexError" in message
        reports = sorted((tmp_path / "streamserve" / "crashes").iterdir())
        assert len(reports) == figures["deaths"] == llm.incidents().crash_reports
        assert reports[-1].name in message
        report = json.loads(reports[-1].read_text())
        assert report["exception"] == "IndexError"
        assert report["plan"]["spans"][0]["tokens"] == 1
        assert [sequence["request"] for sequence in report["sequences"]] == ["poison"]
        assert any(frame["function"] == "step" for frame in report["traceback"])
        text = json.dumps(report).replace(" ", "")
        for prompt in prompts(2):
            assert ",".join(map(str, prompt[:3])) not in text
        assert (reports[-1].stat().st_mode & 0o777) == 0o600
    record(**figures)


async def test_an_error_of_the_device_ends_the_worker_and_its_requests_continue(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the device ends the worker, and its requests continue. The worker uses the executor of
    GPUs, whose wait for the device fails once."""
    texts = []
    for fault in ("none run", "device run"):
        inject(monkeypatch, tmp_path, fault)
        async with serving(checkpoint, backend="device") as llm:
            asked = [answer(llm, f"r{number}", prompt, 24) for number, prompt in enumerate(prompts(3))]
            texts.append(await asyncio.gather(*asked))
            assert llm.incidents().crash_reports == (fault == "device run")
    assert texts[1] == texts[0]
    assert all(len(text) == 24 for text in texts[0])
    (report,) = (tmp_path / "streamserve" / "crashes").iterdir()
    assert json.loads(report.read_text())["exception"] == "RuntimeError"


async def test_the_death_of_a_rank_is_the_workers_and_its_requests_continue(
    checkpoint: Path, scale: Scale
) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/execution/backends/cuda/test_parallel.py has a worker's part of it")
    texts = []
    for kill in (False, True):
        async with serving(checkpoint, backend="device", tensor_parallel_size=2) as llm:
            worker = llm.process_id()
            asked = [
                asyncio.create_task(answer(llm, f"r{number}", prompt, 60))
                for number, prompt in enumerate(prompts(3))
            ]
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            if kill:
                (rank,) = psutil.Process(worker).children()
                rank.kill()
            texts.append(await asyncio.gather(*asked))
            assert (llm.process_id() != worker) == kill
    assert texts[1] == texts[0]
    assert all(len(text) == 60 for text in texts[0])


@pytest.mark.parametrize("co_batched", ["", " co-batched"], ids=["always", "only co-batched"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("topology", ["one", "pair", "service"])
async def test_a_poison_among_64_streams(
    topology: str,
    phase: str,
    co_batched: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
    record: Callable[..., None],
) -> None:
    """A poison request among 64 streams, with one worker, a pair, and a worker with a draft service: 64 texts
    are right if the fault only occurs with co-batched requests; otherwise there are 63 and one error."""
    if not scale.full:
        pytest.skip("with --full; one fault is tested above, all of them in virtual time")
    if (topology != "pair" and phase == "transfer") or (topology == "service" and phase == "swap"):
        pytest.skip("not a phase of this topology")
    kind = random.Random(f"{topology}{phase}{co_batched}").choice(("crash", "exit", "raise"))
    settings: dict[str, object] = {"draft": "self:1", "speculation_policy": "fixed:2"}
    if phase == "swap":
        settings |= {"num_blocks": 40, "max_model_len": 128, "eviction": "swap", "swap_space": 0.05}
    if topology == "pair":
        settings["pairs"] = 1
    inject(monkeypatch, tmp_path, f"{kind} {phase}{co_batched}")
    async with contextlib.AsyncExitStack() as stack:
        if topology == "service":
            settings["draft"] = stack.enter_context(drafting(str(checkpoint))).address
        llm = await stack.enter_async_context(serving(checkpoint, **settings))
        figures = await survive(llm, "poison", 64)
    if co_batched or phase in ("draft", "verify"):
        assert not figures["refused"]
    elif phase in ("prefill", "decode"):
        assert len(figures["refused"]) == 1
    assert figures["deaths"] <= 2 * math.log2(64) + TRIES + 2
    assert figures["ready_seconds_after_the_last_death"] <= READY_SECONDS
    record(kind=kind, **figures)


async def test_a_worker_that_cannot_be_started_is_started_when_possible(
    checkpoint: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """A worker that cannot be started is started as soon as possible. No file descriptor is left for its
    pipe; open requests wait, and continue with the same text."""
    if not scale.full:
        pytest.skip("with --full; tests/fleet/test_launching.py has it without processes")
    async with serving(checkpoint) as llm:
        (prompt,) = prompts(1)
        expected = await answer(llm, "before", prompt, 100)
        open_request = asyncio.create_task(answer(llm, "open", prompt, 100))
        await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # open files stay open
        try:
            os.kill(llm.process_id(), 9)
            await until(lambda: "could not be started" in llm.health().detail)
            assert llm.health().retry_after
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        freed = time.monotonic()
        assert await open_request == expected
        record(seconds_until_it_was_served=round(time.monotonic() - freed, 2))


@pytest.mark.parametrize("kind", ["slow", "hang"])
async def test_a_long_step_may_finish_and_a_hung_one_is_killed(
    kind: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Scale
) -> None:
    """A long step may finish, and a hanging one is killed: both last longer than `stuck_after`, and the first
    was predicted to do so."""
    if not scale.full:
        pytest.skip("with --full; tests/fleet/test_supervisor.py has it without processes")
    inject(monkeypatch, tmp_path, f"{kind} decode")
    async with serving(checkpoint, stuck_after=4.0) as llm:
        (prompt,) = prompts(1)
        expected = await answer(llm, "calm", prompt)
        assert await answer(llm, "poison", prompt) == expected
        assert (tmp_path / "done").exists()
        assert fleet(llm).workers["unified-0"].incarnation == (1 if kind == "slow" else 2)


def test_over_http_a_poison_is_one_500_or_one_error_event(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Scale
) -> None:
    """Over HTTP a poison request gets one 500 or one error event. The first token is delivered before its
    worker dies."""
    if not scale.full:
        pytest.skip("with --full; the errors of requests are tested in tests/api")
    inject(monkeypatch, tmp_path, "crash decode")

    async def start() -> AsyncLLM:
        llm = AsyncLLM(resolve(str(checkpoint), {"threads": 1, "profile": False, "num_blocks": 400}))
        await llm.start()
        return llm

    with served(start) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}
        expected = server.post("/v1/completions", **body).json()["choices"][0]["text"]
        response = server.post("/v1/completions", **body, seed=1313)
        assert response.status_code == 500
        assert "ended its worker 3 times while it ran alone" in response.json()["error"]["message"]
        assert response.headers["x-request-id"]
        waiting = server.http.get("/health")
        assert waiting.status_code == 503
        assert 1 <= int(waiting.headers["retry-after"]) <= 120
        until_true(lambda: server.http.get("/health").status_code == 200, 60)
        stream = server.post("/v1/completions", **body, seed=1313, stream=True)
        *_, last, done, rest = stream.text.split("\n\n")
        assert (stream.status_code, done, rest) == (200, "data: [DONE]", "")
        assert stream.text.count('"error"') == 1
        assert "ended its worker" in json.loads(last.removeprefix("data: "))["error"]["message"]
        until_true(lambda: server.http.get("/health").status_code == 200, 60)
        again = server.post("/v1/completions", **body)
        assert again.json()["choices"][0]["text"] == expected
        assert server.metric("requests_given_up_total") == 2
        assert server.metric("worker_deaths_total") == 8
        assert server.metric("num_requests_quarantined") == 0


def test_a_script_waits_for_a_restarted_worker(checkpoint: Path, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/fleet/test_launching.py has it without processes")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(checkpoint), threads=1, profile=False) as llm:
        (before,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        os.kill(llm._llm.process_id(), signal.SIGKILL)
        until_true(lambda: not llm._llm.health().ready)
        (after,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
