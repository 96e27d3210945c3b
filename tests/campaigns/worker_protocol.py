"""The family `worker_protocol`: forged messages between the fleet and real workers cost no text.

Nor do those that can be read, or that only a worker gets, cost a worker.

What cannot be read costs the worker that seems to have sent it, and time; the fleet lives on.
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
from tests.campaigns.settings import FOLDER, PLAIN, models
from tests.campaigns.settings.asking import Text, whole
from tests.campaigns.settings.workload import Asked, request
from tests.campaigns.watching import captured, first_fault
from tests.campaigns.wire import Wire, Wiretapped

REQUESTS = 24
SECONDS = 40.0
STRANGERS = (b"nobody/1", b"unified-0/99", b"unified-0", b"unified-0/x", b"\xff\xfe", b"/", b"decode-0/-1")
TASK_FAILED = "a task of the fleet failed"
MODEL = models(FOLDER)["llama"]


class Trials:
    """The family, with the texts of a fleet that is left alone."""

    def __init__(self) -> None:
        self._expected: dict[int, Text] = {}

    def trial(self, seed: int) -> Outcome:
        rng = Random(f"worker-protocol-{seed}")
        given: dict[str, Any] = PLAIN | {"num_blocks": 300, "log_level": "warning"}
        if rng.random() < 0.5:
            given |= {"pairs": 1, "draft": MODEL.path}
        lost = rng.random() < 0.3  # bytes that cost the worker that seems to have sent them
        strangers = [rng.choice(STRANGERS) for _ in range(rng.choice((0, 0, 1, 3)))]
        shown = {"pairs": given.get("pairs", 0), "unreadable_to_fleet": lost, "strangers": str(strangers)}
        with captured() as log, tempfile.TemporaryDirectory() as folder:
            try:
                counts = asyncio.run(
                    _unless(
                        lambda: TASK_FAILED in log.text(),
                        self._forge(rng, given, Path(folder), lost, strangers),
                    )
                )
                if TASK_FAILED in log.text():
                    raise TrialFailure(TRACEBACK, TASK_FAILED)
            except TrialFailure as failure:
                detail = f"{failure.detail}\n{_telling(log.text())}"
                return Outcome(verdict="failed", kind=failure.kind, detail=detail, settings=shown)
        return Outcome(verdict="passed", settings=shown, counts=counts)

    def figures(self) -> dict[str, Any]:
        return {}

    async def _forge(
        self, rng: Random, given: dict[str, Any], folder: Path, lost: bool, strangers: list[bytes]
    ) -> dict[str, int]:
        wire = Wire(folder)
        llm = Wiretapped(resolve(MODEL.path, given, environ={}), wire)
        try:
            await _in_time(llm.start(), "start")
            await _in_time(_all_ready(llm), "start of all workers")
            asked = [request(number, MODEL.vocabulary) for number in range(REQUESTS)]
            if not self._expected:
                self._expected = {one.number: await whole(llm, one) for one in asked}
            _noise(rng, wire, lost)
            speaking = asyncio.create_task(_speak(rng, wire, strangers))
            counts = await _in_time(self._ask(llm, asked, lost), "requests among forged messages")
            await speaking
            wire.to_worker = wire.to_fleet = forging_nothing
            await _in_time(_all_ready(llm), "being ready again")
            await _in_time(self._ask(llm, asked, False), "requests after them")
            await _empty(llm)
            if not lost:
                _no_death(llm)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(llm.close(), 30)
            await wire.close()
        return dict(counts) | {"forged": wire.forged}

    async def _ask(self, llm: AsyncLLM, asked: list[Asked], lost: bool) -> Counter[str]:
        counts: Counter[str] = Counter()

        async def one(asked: Asked) -> None:
            try:
                got = await whole(llm, asked)
            except RequestError as error:
                if not lost:
                    _no_death(llm)
                    raise TrialFailure("refused request", f"{asked.number}: {error.message}") from error
                counts["requests_lost"] += 1
                return
            counts["compared"] += 1
            if got != self._expected[asked.number]:
                detail = f"request {asked.number}: {got} is not {self._expected[asked.number]}"
                raise TrialFailure(WRONG_TEXT, detail)

        try:
            async with asyncio.TaskGroup() as group:
                for each in asked:
                    group.create_task(one(each))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return counts


def forging_nothing(identity: bytes, message: bytes) -> list[bytes]:
    """Forge nothing any more."""
    return []


async def _speak(rng: Random, wire: Wire, strangers: list[bytes]) -> None:
    for name in strangers:
        await asyncio.sleep(rng.random() * 0.3)
        await wire.stranger(name, [rng.randbytes(9)] * rng.choice((1, 1, 2, 3)))


def _telling(log: str) -> str:
    """What a log says of a failure: the fleet's, or the last that a worker could not handle."""
    if TASK_FAILED in log:
        return first_fault(log[log.index(TASK_FAILED) + len(TASK_FAILED) :]) or TASK_FAILED
    tracebacks = log.split("Traceback (most recent call last)")[1:]
    deaths = [text for text in tracebacks if "decode_to_worker" not in text]
    return (deaths or [log])[-1][-700:]


def _noise(rng: Random, wire: Wire, lost: bool) -> None:
    left = [1 if lost else 0]

    def to_worker(identity: bytes, message: bytes) -> list[bytes]:
        return forging.to_worker(rng, message) if rng.random() < 0.6 else []

    def to_fleet(identity: bytes, message: bytes) -> list[bytes]:
        if left[0] and rng.random() < 0.05:
            left[0] -= 1
            return [forging.unreadable_to_fleet(rng, message)]
        return forging.to_fleet(rng, message) if rng.random() < 0.5 else []

    wire.to_worker, wire.to_fleet = to_worker, to_fleet


async def _unless(failed: Callable[[], bool], work: Coroutine[Any, Any, dict[str, int]]) -> dict[str, int]:
    """Do the work, but end it as soon as it can only hang."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait([task], timeout=0.5))[0]:
        if failed():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise TrialFailure(HANG, "nobody listens to workers any more")
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


async def _empty(llm: AsyncLLM) -> None:
    """Wait until neither fleet nor workers hold anything, of ghosts or others."""
    fleet = llm._runtime.fleet
    for _ in range(500):
        reports = [worker.report for worker in fleet.workers.values()]
        held = [(r.blocks_live, r.running, r.waiting) for r in reports if r]
        if not any(map(any, held)) and not fleet.requests and not len(fleet.tickets):
            return
        await asyncio.sleep(0.02)
    detail = (
        f"blocks, running, waiting: {held}, requests {list(fleet.requests)}, tickets {len(fleet.tickets)}"
    )
    raise TrialFailure(LEFT_BEHIND, detail)


def _no_death(llm: AsyncLLM) -> None:
    workers = llm._runtime.fleet.workers.items()
    died = {name: worker.incarnation for name, worker in workers if worker.incarnation > 1}
    if died:
        raise TrialFailure(DEATH, f"workers died: {died}")


@contextlib.contextmanager
def opened() -> Any:
    """Set the family up."""
    yield Trials()
