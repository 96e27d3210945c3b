"""The fleet's runtime survives failures of its environment: of starting processes, of observers, of its own
tasks. The workers are fakes in this process that use the real protocol."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import zmq.asyncio

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open, Tick, WorkerLost, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.fleet.runtime import FleetRuntime
from streamserve.fleet.tracing.recorder import Recorder
from streamserve.fleet.tracing.timeline import Timeline
from streamserve.protocol.config import ModelConfig, WorkerConfig
from streamserve.protocol.errors import FleetError, RequestError, StartError
from streamserve.protocol.messages import Events, Token, encode
from streamserve.protocol.sampling import SamplingParams
from tests.fleet.fake_worker import FakeWorker
from tests.fleet.fakes import W

PARAMS = SamplingParams(seed=1, max_tokens=3)


class Launcher:
    """Starts fake workers; raises `error` if it is set."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.started: list[FakeWorker] = []
        self.starts = 0

    async def __call__(self, config: WorkerConfig) -> FakeWorker:
        self.starts += 1
        if self.error:
            raise self.error
        self.started.append(FakeWorker(config))
        return self.started[-1]


@contextlib.asynccontextmanager
async def running(
    launcher: Launcher, recorder: Recorder | None = None, ready: bool = True
) -> AsyncGenerator[FleetRuntime, None]:
    def settings(worker: str, incarnation: int, endpoint: str) -> WorkerConfig:
        return WorkerConfig(
            worker=f"{worker}/{incarnation}", role="unified", endpoint=endpoint, model=ModelConfig(path="")
        )

    async with (
        asyncio.timeout(60),
        FleetRuntime(FleetConfig(), settings, recorder, partial(LocalLauncher, launch=launcher)) as runtime,
    ):
        if ready:
            await runtime.until_ready()
        yield runtime


async def ask(runtime: FleetRuntime, name: str) -> list[int]:
    tokens: list[int] = []
    async with aclosing(runtime.submit(Open(name, [1, 2], PARAMS))) as steps:
        async for events in steps:
            tokens += [event.token for event in events if isinstance(event, Token)]
    return tokens


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "identity", [b"unknown/1", b"unified-0/99", b"unified-0/x", b"unified-0", b"\xff", b"/"]
)
async def test_an_unknown_sender_on_the_endpoint_kills_no_worker(identity: bytes) -> None:
    async with running(Launcher()) as runtime:
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, identity)
        stranger.connect(runtime.driver.launcher.control.endpoint)
        for parts in ([b"\x01\x02"], [b"a", b"b", b"c"], [encode(Events([]))]):
            await stranger.send_multipart(parts)
        try:
            for name in "abc":
                assert await ask(runtime, name) == [0, 1, 2]
                await asyncio.sleep(0.05)
            assert runtime.fleet.workers[W].incarnation == 1
            assert runtime.fleet.health() == (True, "ready")
        finally:
            stranger.close(linger=0)


async def test_a_worker_that_cannot_be_started_is_tried_again() -> None:
    launcher = Launcher()
    async with running(launcher) as runtime:
        assert await ask(runtime, "a") == [0, 1, 2]
        launcher.error = OSError(24, "Too many open files")
        launcher.started[0].kill()
        await until(lambda: launcher.starts >= 3)
        ready, why = runtime.fleet.health()
        assert not ready
        assert "could not be started: [Errno 24] Too many open files" in why
        waiting = asyncio.create_task(ask(runtime, "b"))
        await asyncio.sleep(0)
        launcher.error = None
        assert await waiting == [0, 1, 2]
        assert runtime.fleet.health() == (True, "ready")


async def test_waiting_requests_are_refused_when_starts_keep_failing() -> None:
    launcher = Launcher()
    async with running(launcher) as runtime:
        runtime.fleet.workers[W].failed_starts = 2
        launcher.error = OSError(12, "Cannot allocate memory")
        launcher.started[0].kill()
        await until(lambda: not runtime.fleet.health()[0])
        with pytest.raises(StartError, match="Cannot allocate memory"):
            await runtime.until_ready()
        launcher.error = None
        assert runtime.fleet.availability.retry_after(0.0) > 0


async def test_a_first_start_that_fails_is_an_error_at_startup() -> None:
    launcher = Launcher()
    launcher.error = OSError(12, "Cannot allocate memory")
    async with running(launcher, ready=False) as runtime:
        with pytest.raises(Exception, match="Cannot allocate memory"):
            await runtime.until_ready()


async def test_a_full_disk_ends_the_timeline_but_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    async with running(Launcher(), Recorder([timeline])) as runtime:
        assert await ask(runtime, "a") == [0, 1, 2]
        timeline._file.close()
        timeline._file = Path("/dev/full").open("w", encoding="utf-8", buffering=1)  # noqa: ASYNC230, SIM115
        for name in "bcd":
            assert await ask(runtime, name) == [0, 1, 2]
        assert runtime.incidents().observer_failures == 1
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1


async def test_a_recorder_that_fails_is_no_longer_used(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder([])
    monkeypatch.setattr(recorder, "observe", lambda *args: 1 / 0)
    async with running(Launcher(), recorder) as runtime:
        assert await ask(runtime, "a") == [0, 1, 2]
        assert runtime.incidents().observer_failures == 1


class FaultyFleet(Fleet):
    """Raises on the events in `fault`, the given number of times."""

    faults: ClassVar[list[type]] = []

    def handle(self, event, now):
        kind = type(event.message) if isinstance(event, WorkerMessage) else type(event)
        if kind in self.faults:
            self.faults.remove(kind)
            raise KeyError(kind.__name__)
        return super().handle(event, now)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> type[FaultyFleet]:
    monkeypatch.setattr("streamserve.fleet.runtime.Fleet", FaultyFleet)
    monkeypatch.setattr(FaultyFleet, "faults", [])
    caplog.set_level(logging.CRITICAL)
    return FaultyFleet


async def test_events_that_fail_end_only_their_own_request(faulty: type[FaultyFleet]) -> None:
    async with running(Launcher()) as runtime:
        faulty.faults = [Events]
        with pytest.raises(RequestError, match="failed to handle") as refused:
            await ask(runtime, "a")
        assert refused.value.status == 500
        assert await ask(runtime, "b") == [0, 1, 2]


async def test_the_tick_loop_continues_after_a_failure(faulty: type[FaultyFleet]) -> None:
    async with running(Launcher()) as runtime:
        faulty.faults = [Tick]
        await until(lambda: not faulty.faults)
        faulty.faults = [Tick]
        await until(lambda: not faulty.faults)
        assert await ask(runtime, "b") == [0, 1, 2]


async def test_a_loss_that_cannot_be_processed_ends_the_server(faulty: type[FaultyFleet]) -> None:
    """A loss that cannot be processed ends the server, because the worker's state is unknown: all waiting
    clients and the operator get an error."""
    launcher = Launcher()
    async with running(launcher) as runtime:
        failing = asyncio.create_task(runtime.until_failed())
        waiting = asyncio.create_task(runtime.until_failed())
        runtime.fleet.workers[W].ready = None
        asking = asyncio.create_task(ask(runtime, "a"))
        await asyncio.sleep(0.05)
        faulty.faults = [WorkerLost]
        launcher.started[0].kill()
        for task in (failing, waiting):
            with pytest.raises(FleetError):
                await task
        with pytest.raises(RequestError) as refused:
            await asking
        assert refused.value.status == 500
        with pytest.raises(RequestError):
            await ask(runtime, "b")
