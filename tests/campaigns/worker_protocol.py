"""The family `worker_protocol`: forged messages between the fleet and real workers change no text.

Readable messages, and any messages to workers, do not end a worker. An unreadable message to the fleet ends
the worker that it names as sender; the fleet continues.
"""

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.settings.resolve import resolve
from tests.campaigns import forging
from tests.campaigns.outcome import DEATH, HANG, LEFT_BEHIND, TRACEBACK, WRONG_TEXT, Outcome, TrialFailure
from tests.campaigns.process_output import captured, first_fault
from tests.campaigns.proxy import ProxiedAsyncLLM, Proxy
from tests.campaigns.settings import FOLDER, PLAIN, models
from tests.campaigns.settings.trial_client import Answer, complete_answer
from tests.campaigns.settings.workload import TrialRequest, make_request
from tests.reports import newer_reports

REQUESTS = 24
SECONDS = 40.0
STRANGERS = (b"stranger/1", b"unified-0/99", b"unified-0", b"unified-0/x", b"\xff\xfe", b"/", b"decode-0/-1")
TASK_FAILED = "a task of the fleet failed"
MODEL = models(FOLDER)["llama"]


class Trials:
    """Trials that compare texts with the answers of a fleet without forged messages."""

    def __init__(self) -> None:
        self._expected: dict[int, Answer] = {}

    def trial(self, seed: int) -> Outcome:
        rng = Random(f"worker-protocol-{seed}")
        overrides: dict[str, Any] = PLAIN | {"num_blocks": 300, "log_level": "warning"}
        if rng.random() < 0.5:
            overrides |= {"pairs": 1, "draft": MODEL.path}
        unreadable = rng.random() < 0.3  # bytes that end the worker that they name as the sender
        strangers = [rng.choice(STRANGERS) for _ in range(rng.choice((0, 0, 1, 3)))]
        reported = {
            "pairs": overrides.get("pairs", 0),
            "unreadable_to_fleet": unreadable,
            "strangers": str(strangers),
        }
        with captured() as log, tempfile.TemporaryDirectory() as folder:
            try:
                counts = asyncio.run(
                    _run_unless(
                        lambda: TASK_FAILED in log.text(),
                        self._forge(rng, overrides, Path(folder), unreadable, strangers),
                    )
                )
                if TASK_FAILED in log.text():
                    raise TrialFailure(TRACEBACK, TASK_FAILED)
            except TrialFailure as failure:
                detail = f"{failure.detail}\n{_relevant_log(log.text())}"
                return Outcome(verdict="failed", kind=failure.kind, detail=detail, settings=reported)
        return Outcome(verdict="passed", settings=reported, counts=counts)

    def figures(self) -> dict[str, Any]:
        return {}

    async def _forge(
        self, rng: Random, overrides: dict[str, Any], folder: Path, unreadable: bool, strangers: list[bytes]
    ) -> dict[str, int]:
        proxy = Proxy(folder)
        llm = ProxiedAsyncLLM(resolve(MODEL.path, overrides, environ={}), proxy)
        try:
            await _in_time(llm.start(), "start")
            await _in_time(_all_ready(llm), "start of all workers")
            requests = [make_request(number, MODEL.vocabulary) for number in range(REQUESTS)]
            if not self._expected:
                self._expected = {request.number: await complete_answer(llm, request) for request in requests}
            _start_forging(rng, proxy, unreadable)
            strangers_task = asyncio.create_task(_send_as_strangers(rng, proxy, strangers))
            counts = await _in_time(self._send(llm, requests, unreadable), "requests among forged messages")
            await strangers_task
            proxy.to_worker = proxy.to_fleet = forge_nothing
            await _in_time(_all_ready(llm), "being ready again")
            await _in_time(self._send(llm, requests, False), "requests after them")
            await _wait_until_idle(llm)
            if not unreadable:
                _check_deaths(llm)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(llm.close(), 30)
            await proxy.close()
        return dict(counts) | {"forged": proxy.forged}

    async def _send(self, llm: AsyncLLM, requests: list[TrialRequest], unreadable: bool) -> Counter[str]:
        counts: Counter[str] = Counter()

        async def check(request: TrialRequest) -> None:
            try:
                received = await complete_answer(llm, request)
            except RequestError as error:
                if not unreadable:
                    _check_deaths(llm)
                    raise TrialFailure("refused request", f"{request.number}: {error.message}") from error
                counts["requests_lost"] += 1
                return
            counts["compared"] += 1
            if received != self._expected[request.number]:
                detail = f"request {request.number}: {received} is not {self._expected[request.number]}"
                raise TrialFailure(WRONG_TEXT, detail)

        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(check(request))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return counts


def forge_nothing(identity: bytes, message: bytes) -> list[bytes]:
    """Forge no messages."""
    return []


async def _send_as_strangers(rng: Random, proxy: Proxy, strangers: list[bytes]) -> None:
    for name in strangers:
        await asyncio.sleep(rng.random() * 0.3)
        await proxy.send_as(name, [rng.randbytes(9)] * rng.choice((1, 1, 2, 3)))


def _relevant_log(log: str) -> str:
    """Return the part of a log that explains a failure: the fleet's traceback, or the last traceback of a
    worker."""
    if TASK_FAILED in log:
        return first_fault(log[log.index(TASK_FAILED) + len(TASK_FAILED) :]) or TASK_FAILED
    tracebacks = log.split("Traceback (most recent call last)")[1:]
    deaths = [text for text in tracebacks if "decode_to_worker" not in text]
    return (deaths or [log])[-1][-700:]


def _start_forging(rng: Random, proxy: Proxy, unreadable: bool) -> None:
    unreadable_left = [1 if unreadable else 0]

    def to_worker(identity: bytes, message: bytes) -> list[bytes]:
        return forging.to_worker(rng, message) if rng.random() < 0.6 else []

    def to_fleet(identity: bytes, message: bytes) -> list[bytes]:
        if unreadable_left[0] and rng.random() < 0.05:
            unreadable_left[0] -= 1
            return [forging.unreadable_to_fleet(rng, message)]
        return forging.to_fleet(rng, message) if rng.random() < 0.5 else []

    proxy.to_worker, proxy.to_fleet = to_worker, to_fleet


async def _run_unless(
    failed: Callable[[], bool], work: Coroutine[Any, Any, dict[str, int]]
) -> dict[str, int]:
    """Run a task; cancel it as soon as `failed` returns True, because it would hang."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait([task], timeout=0.5))[0]:
        if failed():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise TrialFailure(HANG, "the fleet no longer receives messages")
    return task.result()


async def _in_time(work: Any, what: str) -> Any:
    try:
        return await asyncio.wait_for(work, SECONDS)
    except TimeoutError:
        raise TrialFailure(HANG, f"{what}: not done after {SECONDS:g} s") from None


async def _all_ready(llm: AsyncLLM) -> None:
    workers = llm._runtime.fleet.workers.values()
    while not all(worker.ready for worker in workers) or not llm.health().ready:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _wait_until_idle(llm: AsyncLLM) -> None:
    """Wait until fleet and workers hold no resources, including those of forged requests."""
    fleet, reported = llm._runtime.fleet, newer_reports(llm)
    for _ in range(500):
        reports = [worker.report for worker in fleet.workers.values()]
        counts_held = [(r.blocks_live, r.running, r.waiting) for r in reports if r]
        held = any(map(any, counts_held)) or fleet.requests or len(fleet.transfers.reservations)
        if reported() and not held:
            return
        await asyncio.sleep(0.02)
    detail = (
        f"blocks, running, waiting: {counts_held}, requests {list(fleet.requests)}, "
        f"reservations {len(fleet.transfers.reservations)}"
    )
    raise TrialFailure(LEFT_BEHIND, detail)


def _check_deaths(llm: AsyncLLM) -> None:
    workers = llm._runtime.fleet.workers.items()
    died = {name: worker.incarnation for name, worker in workers if worker.incarnation > 1}
    if died:
        raise TrialFailure(DEATH, f"workers died: {died}")


@contextlib.contextmanager
def open_campaign() -> Any:
    """Set the family up."""
    yield Trials()
