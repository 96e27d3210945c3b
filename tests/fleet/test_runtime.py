"""Real worker processes are restarted when they die, exit with their parent, and leak nothing."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from streamserve.llm.async_llm import AsyncLLM, new_request_id
from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta, Usage
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.reports import newer_reports

PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=11, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def running(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(
        resolve(str(checkpoint), {"threads": 1, "log_level": "warning", "profile": False}, environ={})
    )
    await llm.start()
    try:
        yield llm
        await assert_idle(llm)
    finally:
        process, folder = llm.process_id(), llm._runtime.driver.launcher.control.folder
        await llm.close()
    assert not psutil.pid_exists(process)
    assert not folder.exists()


@pytest.fixture
async def llm(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    async with running(checkpoint) as llm:
        yield llm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_llm(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    """A model for tests that leave no trace. It runs in the event loop of the module."""
    async with running(checkpoint) as llm:
        yield llm


async def test_a_close_that_is_cancelled_leaves_neither_socket_nor_folder(checkpoint: Path) -> None:
    llm = AsyncLLM(resolve(str(checkpoint), {"threads": 1, "log_level": "warning", "profile": False}))
    await llm.start()
    closing = asyncio.create_task(llm.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert llm._runtime.driver.launcher.control.closed
    assert not llm._runtime.driver.launcher.control.folder.exists()
    await llm._runtime.driver.processes.close()


def test_a_runtime_that_is_not_closed_does_not_block_exit(checkpoint: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, gc
        from streamserve.llm.async_llm import AsyncLLM
        from streamserve.settings.resolve import resolve

        async def forget():
            llm = AsyncLLM(resolve({str(checkpoint)!r}, {{"threads": 1}}))
            await llm.start()
            return llm._runtime.driver.launcher.control.folder

        folder = asyncio.run(forget())
        gc.collect()
        print(folder.exists())
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


async def assert_idle(llm: AsyncLLM) -> Report:
    """Assert that the worker soon reports no allocated blocks, after all requests."""
    reported = newer_reports(llm)
    async with asyncio.timeout(30):
        while True:
            report = llm.report()
            if reported() and report and not (report.running or report.waiting or report.blocks_live):
                assert not llm._runtime.fleet.requests
                assert not llm._runtime._clients
                return report
            await asyncio.sleep(0.05)


async def collect(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams, on_token=None
) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
    async with aclosing(llm.submit(prompt, params, request_id=new_request_id())) as items:
        async for item in items:
            if isinstance(item, ChoiceDelta):
                tokens[item.choice] += item.tokens
                if on_token:
                    on_token(len(tokens[item.choice]))
    return tokens


async def test_a_killed_worker_costs_time_never_text(llm: AsyncLLM) -> None:
    is_healthy = await collect(llm, [5, 6, 7], LONG)
    assert len(is_healthy[0]) == 400
    killed = 0

    def kill_at_20(count: int) -> None:
        nonlocal killed
        if count == 20:
            killed = llm.process_id()
            os.kill(killed, signal.SIGKILL)

    # The worker may have sent everything before the signal arrived.
    while not killed or killed == llm.process_id():
        concurrent = [asyncio.create_task(collect(llm, [5, 6, 7], LONG)) for _ in range(3)]
        assert await collect(llm, [5, 6, 7], LONG, kill_at_20) == is_healthy
        for task in concurrent:
            assert await task == is_healthy


async def test_a_new_request_waits_while_the_only_worker_restarts(llm: AsyncLLM) -> None:
    expected = await collect(llm, [5, 6, 7], LONG)
    os.kill(llm.process_id(), signal.SIGKILL)
    for _ in range(10_000):
        if not llm.health().ready:
            break
        await asyncio.sleep(0.001)
    assert not llm.health().ready
    assert await collect(llm, [5, 6, 7], LONG) == expected
    assert llm.incidents().deaths == 1


async def test_leaving_early_frees_the_worker(llm: AsyncLLM) -> None:
    params = SamplingParams(n=16, max_tokens=500, ignore_eos=True, seed=1)
    async with aclosing(llm.submit([1, 2, 3], params, request_id="r")) as items:
        async for item in items:
            assert isinstance(item, ChoiceDelta)
            break
    report = await assert_idle(llm)
    assert report.generation_tokens < 16 * 500


async def test_many_requests_with_random_cancels_leak_nothing(
    llm: AsyncLLM, scale: Scale, record: Callable[..., None]
) -> None:
    """Many requests with random cancellations leak nothing: a quarter is closed after some tokens, and an
    eighth is cancelled, some of them before they began."""
    total = scale.pick(80, 400)
    rng = random.Random(scale.seed)

    async def one(number: int) -> bool:
        params = SamplingParams(
            n=rng.choice((1, 1, 3)),
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            max_tokens=30,
            ignore_eos=True,
        )
        prompt = list(range(4, 5 + rng.randrange(60)))
        leave = rng.randrange(20) if number % 4 == 0 else None
        count = 0
        async with aclosing(llm.submit(prompt, params, request_id=f"r{number}")) as items:
            async for item in items:
                if isinstance(item, Usage):
                    assert count == item.completion_tokens == 30 * params.n
                    return True
                count += isinstance(item, ChoiceDelta)
                if leave is not None and count > leave:
                    return False
        raise AssertionError("a stream ended without its usage")

    async def cancelled(number: int) -> bool:
        task = asyncio.create_task(one(number))
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
        await asyncio.wait([task])
        return not task.cancelled()

    await collect(llm, [1], PARAMS)
    gc.collect()  # Files that earlier tests left to the garbage collector are not from this test.
    before = psutil.Process().num_fds(), len(asyncio.all_tasks())
    worker = psutil.Process(llm.process_id())
    worker_files = worker.num_fds()
    ended = await asyncio.gather(*((cancelled if n % 8 == 1 else one)(n) for n in range(total)))
    report = await assert_idle(llm)
    assert sum(ended) >= total * 5 // 8
    assert not all(ended)
    assert (psutil.Process().num_fds(), len(asyncio.all_tasks())) == before
    assert worker.num_fds() == worker_files
    record(
        requests=total, completed=sum(ended), preemptions=report.preemptions, tokens=report.generation_tokens
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stop_string_ends_its_choice_in_the_worker_too(shared_llm: AsyncLLM) -> None:
    is_healthy = await collect(shared_llm, [5, 6, 7], PARAMS)
    text = shared_llm.tokenizer.decode(is_healthy[0])
    stop = text[len(text) // 2 :][:4]
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True, stop=(stop,))
    pieces, last = "", None
    async for item in shared_llm.submit([5, 6, 7], params, request_id="r"):
        if isinstance(item, ChoiceDelta):
            pieces += item.text
            last = item
        else:
            assert isinstance(item, Usage)
            assert item.completion_tokens < 60
    assert last is not None
    assert (last.finish, last.stop) == ("stop", stop)
    assert pieces == text[: text.index(stop)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], PARAMS, "prompt"),
        ([1] * 600, PARAMS, "prompt"),
        ([1], SamplingParams(stop_token_ids=(4000,)), "stop_token_ids"),
        ([1], SamplingParams(max_tokens=5000), "max_tokens"),
        ([1], SamplingParams(logit_bias={4000: 1.0}), "logit_bias"),
    ],
)
async def test_bad_requests_are_refused_by_name(shared_llm: AsyncLLM, prompt, params, field) -> None:
    with pytest.raises(RequestError) as caught:
        await collect(shared_llm, prompt, params)
    assert (caught.value.status, caught.value.field) == (400, field)


async def test_a_bad_checkpoint_is_an_error_at_startup(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    llm = AsyncLLM(resolve(str(folder), {"profile": False}, environ={}))
    with pytest.raises(CheckpointError, match="safetensors"):
        await llm.start()
    assert not llm._runtime.driver.launcher.control.folder.exists()


def test_a_worker_exits_with_its_parent(checkpoint: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys
        from streamserve import LLM
        llm = LLM({str(checkpoint)!r}, threads=1)
        print(llm._llm.process_id(), flush=True)
        sys.stdin.read()
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    assert worker.is_running()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)
