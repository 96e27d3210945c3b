"""Answers a file of requests with an AsyncLLM, in the way in which a server answers a batch."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
import uvloop
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from streamserve.api.app import app_context, generation_endpoints
from streamserve.cli.answers import log_warnings
from streamserve.cli.serving import api_settings
from streamserve.extras.batches.caller import Caller
from streamserve.extras.batches.lines import (
    ENDPOINTS,
    LineError,
    LinePosition,
    RequestLine,
    ResultLine,
    append_line,
    complete_lines,
    parse_line,
    places,
    result_of,
)
from streamserve.extras.batches.ordered import run_in_order
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.settings.options import Settings, SettingsError


@dataclass(frozen=True)
class FileOutcome:
    """Numbers of requests: all, those that had a result before the run, and those that failed in any
    run."""

    requests: int
    earlier: int
    failed: int


def run(settings: Settings, source: Path, target: Path) -> FileOutcome:
    """Answer the requests of `source` that have no result in `target`.

    Raises RequestError naming the line, if a line is not a request, or if `target` has results of other
    requests. Raises SettingsError if a file cannot be read or written. Both are raised before the model is
    loaded.
    """
    log_warnings(settings)
    for path in (source, target):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise SettingsError(f"{path} is a pipe or a device: batches are continued from files")
    with _refusing(source, "read"):
        requests = source.open("rb")
    with requests:
        names = _checked(requests, settings.server.max_body_bytes)
        done, failed = _finished(target, names) if target.is_file() else (0, 0)
        with _refusing(target, "written"):
            results = target.open("ab", buffering=0)
        with results:
            if done < len(names):
                failed += uvloop.run(_answer(settings, requests, results, done, len(names)))
    return FileOutcome(len(names), done, failed)


@contextmanager
def _refusing(path: Path, verb: str) -> Iterator[None]:
    """Raise SettingsError if a file cannot be opened."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{path} cannot be {verb}: {error.strerror}") from error


def _checked(requests: BinaryIO, max_bytes: int) -> list[str]:
    """Return the custom ids of all requests. Raises RequestError naming a line that is not a request."""
    try:
        names = [_line(requests, place).custom_id for place in places(requests, max_bytes)]
    except LineError as error:
        raise RequestError(f"{requests.name}, line {error.line}: {error.message}") from error
    if len(names) > len(set(names)):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise RequestError(f"{requests.name}: several requests have the custom_id {twice!r}")
    return names


def _line(requests: BinaryIO, place: LinePosition) -> RequestLine:
    return parse_line(place.read(requests), place.number, ENDPOINTS)


def _finished(target: Path, names: list[str]) -> tuple[int, int]:
    """Return the number of requests with a result, and how many of these results are failures.

    Raises RequestError if the results belong to other requests.
    """
    found: list[ResultLine] = []

    def read(text: bytes) -> None:
        try:
            found.append(msgspec.json.decode(text, type=ResultLine))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{target}, line {len(found) + 1} is not a result: {error}") from error
        if [result.custom_id for result in found[-1:]] != names[len(found) - 1 : len(found)]:
            raise RequestError(
                f"{target}, line {len(found)} is not the result of this line of the input: choose another "
                "--output, or delete the file"
            )

    complete_lines(target, read)
    return len(found), sum(not result.succeeded for result in found)


async def _answer(settings: Settings, requests: BinaryIO, results: FileIO, done: int, total: int) -> int:
    """Answer all requests except the first `done`, and append the results to `results`; return the number of
    failures."""
    llm = AsyncLLM(settings)
    failed = 0
    await llm.start()
    try:
        context = app_context(llm, api_settings(settings, local_only=True))
        caller = Caller(context, generation_endpoints(context))
        rest = _rest(requests, settings.server.max_body_bytes, done)
        width = settings.server.batch_concurrency

        async def work(place: LinePosition) -> ResultLine:
            line = _line(requests, place)
            return result_of(line.custom_id, await caller.answer(line, ""))

        with _progress(done, total) as (progress, bar):

            def record(result: ResultLine) -> None:
                nonlocal failed
                append_line(results, msgspec.json.encode(result) + b"\n")
                failed += not result.succeeded
                progress.advance(bar)

            await run_in_order(rest, work, record, asyncio.Semaphore(width), width)
    finally:
        await llm.close()
    return failed


async def _rest(requests: BinaryIO, max_bytes: int, done: int) -> AsyncIterator[LinePosition]:
    """Yield the positions of all requests except the first `done`."""
    for place in islice(places(requests, max_bytes), done, None):
        yield place


@contextmanager
def _progress(done: int, total: int) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar on standard error."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress, progress.add_task("requests", total=total, completed=done)
