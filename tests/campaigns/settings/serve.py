"""One trial of settings: real workers, requests by library and HTTP, and no resources left at the end."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from random import Random

import httpx
import psutil
from starlette.applications import Starlette

from streamserve.api.app import create_app
from streamserve.api.http.connection import Timeouts
from streamserve.api.http.server import BindError, bind, serve
from streamserve.cli.serving import api_settings, is_loopback
from streamserve.extras.batches.folder import FolderError
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import CheckpointError, StartError
from streamserve.protocol.reports import Report
from streamserve.settings.options import Settings, SettingsError
from tests.campaigns.outcome import DEATH, HANG, LEFT_BEHIND, UNCLEAR, TrialFailure
from tests.campaigns.settings.special import API_KEY
from tests.campaigns.settings.trial_client import TrialClient
from tests.campaigns.settings.workload import TrialRequest
from tests.reports import newer_reports

START_SECONDS = 90.0
ANSWER_SECONDS = 300.0
CLOSE_SECONDS = 40.0
EMPTY_SECONDS = 20.0
MAX_MESSAGE = 700

REFUSALS = (SettingsError, CheckpointError, StartError, BindError, FolderError)
"""Errors that say that settings cannot be served, as users see them: one line that names the setting to
change."""


class Refused(Exception):
    """Raised for settings that were refused by name."""


def as_refusal(error: Exception) -> Refused:
    """Return a refusal for the error. Raises TrialFailure if its message does not say in one line what is
    wrong."""
    message = str(error)
    if isinstance(error, StartError) and "exit status" in message:
        raise TrialFailure(DEATH, message)
    if not 10 <= len(message) <= MAX_MESSAGE or "\n" in message or "Traceback" in message:
        raise TrialFailure(UNCLEAR, message)
    return Refused(f"{type(error).__name__}: {message}")


@contextlib.asynccontextmanager
async def serving_model(settings: Settings) -> AsyncIterator[tuple[AsyncLLM, str]]:
    """Serve in this process, as `streamserve serve` does; yields the model and the URL. Raises Refused for
    settings that cannot be served, TrialFailure if starting or ending fails otherwise."""
    try:
        listener, llm = bind(settings.server.host, settings.server.port), AsyncLLM(settings)
    except REFUSALS as error:
        raise as_refusal(error) from error
    with listener:
        server_task: asyncio.Task[None] | None = None
        try:
            await _started(llm)
            server_task = asyncio.create_task(_serve(settings, _app(settings, llm, listener), listener))
            host, port = listener.getsockname()[:2]
            yield llm, f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            if server_task is not None:
                server_task.cancel()
                await asyncio.gather(server_task, return_exceptions=True)
            await _closed(llm)


async def _started(llm: AsyncLLM) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            await llm.start()
            while not all(worker.ready for worker in llm._runtime.fleet.workers.values()):
                await llm.until_ready()
                await asyncio.sleep(0.01)
    except REFUSALS as error:
        raise as_refusal(error) from error
    except TimeoutError:
        raise TrialFailure(HANG, f"not ready after {START_SECONDS:g} s: {llm.health().detail}") from None


def _app(settings: Settings, llm: AsyncLLM, listener: socket.socket) -> Starlette:
    local = is_loopback(listener) and not settings.server.api_key
    try:
        return create_app(llm, api_settings(settings, local_only=local))
    except REFUSALS as error:
        raise as_refusal(error) from error


async def _serve(settings: Settings, app: Starlette, listener: socket.socket) -> None:
    server = settings.server
    timeouts = Timeouts(server.read_timeout, server.write_timeout)
    limit = server.max_body_bytes
    await serve(app, listener, timeouts=timeouts, grace_seconds=1.0, max_message_bytes=limit)


async def _closed(llm: AsyncLLM) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await llm.close()
    except TimeoutError:
        raise TrialFailure(HANG, f"not closed after {CLOSE_SECONDS:g} s") from None


async def serve_requests(
    settings: Settings,
    make_client: Callable[[AsyncLLM, httpx.AsyncClient], TrialClient],
    requests: list[TrialRequest],
    max_wait: float = ANSWER_SECONDS,
) -> tuple[dict[str, int], Report | None]:
    """Serve all requests of a trial at once; return the counts and the workers' last report. Raises Refused
    or TrialFailure."""
    key = {"Authorization": f"Bearer {API_KEY}"}
    async with serving_model(settings) as (llm, url):
        workers = [llm.process_id(name) for name in llm._runtime.fleet.workers]
        async with httpx.AsyncClient(base_url=url, headers=key, timeout=ANSWER_SECONDS) as http:
            client = make_client(llm, http)
            try:
                async with asyncio.timeout(max_wait), asyncio.TaskGroup() as group:
                    for request in requests:
                        group.create_task(client.ask(request))
            except TimeoutError:
                check_deaths(llm)
                raise TrialFailure(HANG, f"no answer after {max_wait:g} s") from None
            except BaseExceptionGroup as errors:
                check_deaths(llm)
                raise errors.exceptions[0] from None
        check_deaths(llm)
        await _wait_until_idle(llm)
        check_deaths(llm)
        report = llm.report()
    remaining = [worker for worker in workers if psutil.pid_exists(worker)]
    if remaining:
        raise TrialFailure(LEFT_BEHIND, f"processes {remaining}")
    return client.counts, report


def check_deaths(llm: AsyncLLM) -> None:
    """Raise TrialFailure if a worker has died."""
    workers = llm._runtime.fleet.workers.items()
    died = {name: worker.incarnation for name, worker in workers if worker.incarnation > 1}
    if died:
        raise TrialFailure(DEATH, f"workers died: {died}")


async def _wait_until_idle(llm: AsyncLLM) -> None:
    """Wait until no request, block or transfer reservation is in use, by reports sent after all requests."""
    fleet, deadline, reported = llm._runtime.fleet, time.monotonic() + EMPTY_SECONDS, newer_reports(llm)
    while True:
        held = [worker.report and worker.report.blocks_live for worker in fleet.workers.values()]
        if reported() and not any(held) and not fleet.requests and not len(fleet.transfers.reservations):
            return
        if time.monotonic() > deadline:
            kept = len(fleet.transfers.reservations)
            remaining = f"blocks {held}, requests {list(fleet.requests)}, reservations {kept}"
            raise TrialFailure(LEFT_BEHIND, remaining)
        await asyncio.sleep(0.02)


def draw_requests(rng: Random, count: int, numbers: int) -> list[int]:
    """Return the numbers of a trial's requests. No number occurs twice, because request ids are made of
    them."""
    return rng.sample(range(numbers), min(count, numbers))
