"""Answers batches in the background, from validation to the result files, across restarts of the server."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from functools import partial
from typing import Any, BinaryIO

import msgspec

from streamserve.api.context import AppContext
from streamserve.api.routes import BoundRoute
from streamserve.extras.batches.caller import Caller
from streamserve.extras.batches.folder import BatchFolder, new_name
from streamserve.extras.batches.lines import (
    PIECE,
    LineError,
    LineFailure,
    LinePosition,
    LineScan,
    RequestLine,
    ResultLine,
    parse_line,
    result_of,
)
from streamserve.extras.batches.ordered import run_in_order
from streamserve.extras.batches.results import Results
from streamserve.extras.batches.schemas import (
    FINAL,
    WINDOW_SECONDS,
    BatchError,
    BatchErrors,
    BatchReply,
    BatchRequest,
    BatchStatus,
    FileReply,
    RequestCounts,
    StoredBatch,
    StoredFile,
)
from streamserve.protocol.errors import RequestError

_log = logging.getLogger(__name__)

MAX_UNFINISHED = 64
"""Maximum number of batches that have not ended."""
RETRY_SECONDS = 10.0
"""Seconds until a batch is resumed after its results could not be written, for example on a full disk."""
_MAX_ERRORS = 100
_FILES = 3
"""Number of files that a running batch has open: its input, and two for results."""


class BatchService:
    """The batches of a server. Their requests share one limit on open requests."""

    def __init__(self, context: AppContext, endpoints: Iterable[BoundRoute], folder: BatchFolder) -> None:
        self.folder = folder
        self._context = context
        self._caller = Caller(context, endpoints)
        self._limit = asyncio.Semaphore(context.settings.batch_concurrency)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._results: dict[str, Results] = {}

    def start(self) -> None:
        """Continue the batches that have not ended."""
        for stored in self.folder.unfinished():
            self._begin(stored)

    async def close(self) -> None:
        """Interrupt all batches; `start` continues them."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self.folder.close()

    def create(self, owner: str, body: BatchRequest) -> BatchReply:
        """Create a batch and start it. Raises RequestError if there are too many."""
        self.folder.check_number()
        if len(self._jobs) >= MAX_UNFINISHED:
            raise RequestError(
                f"{MAX_UNFINISHED} batches have not ended, which is the limit", status=429, retry_after=60.0
            )
        now = int(time.time())
        batch = BatchReply(
            id=new_name("batch_"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=body.metadata,
        )
        stored = StoredBatch(owner=owner, batch=batch, output=new_name("file-"), error=new_name("file-"))
        self.folder.put_batch(stored)
        self._begin(stored)
        return batch

    def reply(self, stored: StoredBatch) -> BatchReply:
        """Return a batch with its current counts."""
        results = self._results.get(stored.batch.id)
        if results is None:
            return stored.batch
        return msgspec.structs.replace(stored.batch, request_counts=results.counts)

    async def cancel(self, stored: StoredBatch) -> BatchReply:
        """End a batch with the results that it has. Raises RequestError (409) if it has ended."""
        name = stored.batch.id
        if stored.batch.status in FINAL:
            raise RequestError(f"this batch has ended: it is {stored.batch.status}", status=409)
        self._change(name, "cancelling")
        job = self._jobs.get(name)
        if job is not None:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
        if self.folder.batches[name].batch.status not in FINAL:
            self._finish(name, "cancelled")
        return self.folder.batches[name].batch

    def _begin(self, stored: StoredBatch) -> None:
        name = stored.batch.id
        self._jobs[name] = asyncio.create_task(self._run(name))
        self._jobs[name].add_done_callback(lambda _: self._jobs.pop(name, None))

    async def _run(self, name: str) -> None:
        """Process a batch until it has ended. Wait while the server drains, and while the folder cannot be
        written."""
        drain = self._context.drain
        while self.folder.batches[name].batch.status not in FINAL:
            await drain.accepting()
            try:
                await _until(drain.begun(), self._attempt(name))
            except OSError as error:
                _log.error("batch %s waits for its folder, which cannot be written: %s", name, error.strerror)
                await asyncio.sleep(RETRY_SECONDS)

    async def _attempt(self, name: str) -> None:
        """Process a batch. Raises OSError if the folder cannot be written; other errors end the batch."""
        try:
            await self._process(name)
        except RequestError as error:
            self._fail(name, [BatchError(code="batch_failed", message=error.message)])
        except OSError:
            raise
        except Exception as error:
            _log.error("batch %s failed", name, exc_info=error)
            self._fail(name, [BatchError(code="server_error", message="the server failed")])

    async def _process(self, name: str) -> None:
        batch = self.folder.batches[name].batch
        if batch.status == "cancelling":
            self._finish(name, "cancelled")
            return
        path = self.folder.content(batch.input_file_id)
        async with self._context.descriptors.files(_FILES):
            try:
                source = path.open("rb")
            except FileNotFoundError:
                missing = f"the input file {batch.input_file_id} is no longer there"
                self._fail(name, [BatchError(code="input_file_missing", message=missing)])
                return
            with source:
                status = await self._processed(name, source)
        if status is not None:
            self._finish(name, status)

    async def _processed(self, name: str, source: BinaryIO) -> BatchStatus | None:
        """Process a batch; return its final status, or None if it has failed."""
        batch = self.folder.batches[name].batch
        if batch.status == "validating":
            total, errors = await self._validate(batch, source)
            if errors:
                self._fail(name, errors)
                return None
            self._change(name, "in_progress", request_counts=RequestCounts(total=total))
        return await self._answer(name, source)

    async def _validate(self, batch: BatchReply, source: BinaryIO) -> tuple[int, list[BatchError]]:
        """Return the number of requests, and the errors of invalid lines."""
        settings = self._context.settings
        check = _Check(batch.endpoint, settings.max_batch_requests)
        scan = LineScan(source, settings.max_body_bytes)
        while not check.done:
            await self._context.side_thread.run(lambda: check.next(source, scan))
        return check.total, check.errors

    async def _places(self, source: BinaryIO, skipped: int) -> AsyncIterator[LinePosition]:
        """Yield the positions of a file's requests after the first `skipped` ones."""
        scan = LineScan(source, self._context.settings.max_body_bytes)
        while not scan.ended:
            found = await self._context.side_thread.run(scan.next)
            for place in found[skipped:]:
                yield place
            skipped = max(0, skipped - len(found))

    async def _answer(self, name: str, source: BinaryIO) -> BatchStatus:
        """Answer the requests that have no result yet; return the final status of the batch."""
        stored = self.folder.batches[name]
        batch, settings = stored.batch, self._context.settings
        with await self._context.side_thread.run(lambda: Results(self.folder, stored)) as results:
            self.folder.release(results.cut)
            self._results[name] = results
            rest = self._places(source, results.number)

            async def work(place: LinePosition) -> ResultLine:
                line = await self._line(source, place, batch.endpoint)
                return result_of(line.custom_id, await self._caller.answer(line, stored.owner))

            try:
                async with asyncio.timeout(batch.expires_at - time.time()):
                    await run_in_order(rest, work, results.write, self._limit, settings.batch_concurrency)
            except TimeoutError:
                await self._expire(batch, source, results)
                return "expired"
            finally:
                del self._results[name]
                self._change(name, self.folder.batches[name].batch.status, request_counts=results.counts)
        return "completed"

    async def _expire(self, batch: BatchReply, source: BinaryIO, results: Results) -> None:
        """Write a failure for each request without a result."""
        failure = LineFailure("batch_expired", "this request was not answered within the completion window")
        async for place in self._places(source, results.number):
            line = await self._line(source, place, batch.endpoint)
            results.write(result_of(line.custom_id, None, failure))

    async def _line(self, source: BinaryIO, place: LinePosition, endpoint: str) -> RequestLine:
        """Return a request, parsed in the side thread if it is long."""
        parse = partial(_parsed, source, place, (endpoint,))
        return await self._context.side_thread.run_if(place.length > PIECE, parse)

    def _change(self, name: str, status: BatchStatus, **fields: Any) -> None:
        """Change a batch's status, with the time of the change."""
        stored = self.folder.batches[name]
        if status != stored.batch.status:
            fields[f"{status}_at"] = int(time.time())
        self.folder.put_batch(stored.changed(status=status, **fields))

    def _finish(self, name: str, status: BatchStatus) -> None:
        if self.folder.batches[name].batch.status not in ("finalizing", "cancelling"):
            self._change(name, "finalizing")
        self._end(name, status)

    def _fail(self, name: str, errors: list[BatchError]) -> None:
        self._end(name, "failed", errors=BatchErrors(data=errors))

    def _end(self, name: str, status: BatchStatus, **fields: Any) -> None:
        """Create files from the results, and end the batch."""
        stored = self.folder.batches[name]
        output = self._result_file(stored, stored.output, "output")
        error = self._result_file(stored, stored.error, "error")
        self._change(name, status, output_file_id=output, error_file_id=error, **fields)

    def _result_file(self, stored: StoredBatch, name: str, kind: str) -> str | None:
        """Create a file with this id from the results. Return its id, or None if there are no results."""
        path = self.folder.content(name)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            path.unlink(missing_ok=True)
            return None
        file = FileReply(
            id=name,
            bytes=size,
            created_at=int(time.time()),
            filename=f"{stored.batch.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        self.folder.put_file(StoredFile(owner=stored.owner, file=file))
        return name


class _Check:
    """Validates the lines of a batch, a piece of the file at a time."""

    def __init__(self, endpoint: str, max_requests: int) -> None:
        self.done = False
        self.total = 0
        self.errors: list[BatchError] = []
        self._endpoint = endpoint
        self._max_requests = max_requests
        self._seen: set[str] = set()

    def next(self, source: BinaryIO, scan: LineScan) -> None:
        """Check the lines that end in the next piece of the file."""
        try:
            for place in scan.next():
                self._line(source, place)
                if self.done:
                    return
            if scan.ended:
                self._end()
        except LineError as error:
            self._add(error)
            self.done = True

    def _line(self, source: BinaryIO, place: LinePosition) -> None:
        self.total += 1
        if self.total > self._max_requests:
            limit = f"{self._max_requests} requests (max_batch_requests)"
            raise LineError(f"a batch has at most {limit}", place.number)
        try:
            line = _parsed(source, place, (self._endpoint,))
            if line.custom_id in self._seen:
                raise LineError(
                    "custom_id: an earlier line has the same custom_id", place.number, "custom_id"
                )
            self._seen.add(line.custom_id)
        except LineError as error:
            self._add(error)
            self.done = len(self.errors) == _MAX_ERRORS

    def _add(self, error: LineError) -> None:
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(
                BatchError(code="invalid_request", message=error.message, line=error.line, param=error.param)
            )

    def _end(self) -> None:
        self.done = True
        if not self.total:
            self.errors.append(BatchError(code="empty_file", message="the input file has no requests"))


def _parsed(source: BinaryIO, place: LinePosition, endpoints: tuple[str, ...]) -> RequestLine:
    return parse_line(place.read(source), place.number, endpoints)


async def _until(event: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends, or until `event`, which interrupts it."""
    task, interrupt = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait({task, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, interrupt):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, interrupt, return_exceptions=True)
