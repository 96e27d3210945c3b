"""A prompt stream in the engine: edits are synced to the engine, which prefills the prompt while it arrives.

With early answers, it generates from the first tokens on; an edit that changes the prompt makes the answer
void.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from streamserve.fleet.events import ClientEdit, Open
from streamserve.fleet.runtime import FleetRuntime
from streamserve.llm.items import Item, read_items
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.protocol.messages import Event, OutputWithdrawn, Progress
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import Stopwatch
from streamserve.text.message import NewReader
from streamserve.text.output import Usage
from streamserve.text.retokenize import common_prefix
from streamserve.text.tokenizer import Tokenizer


class LocalPromptStream:
    """A request whose prompt is a prompt stream. Call `start`, then `edit`, then `answer` once; always call
    `close`.

    `ids` are the token ids that were last synced to the engine. `computed` of them have KV, by its latest
    report.
    """

    def __init__(self, runtime: FleetRuntime, tokenizer: Tokenizer, opened: Open) -> None:
        self.ids = opened.prompt
        self.computed = 0
        self.created = time.perf_counter()
        self._runtime = runtime
        self._tokenizer = tokenizer
        self._opened = opened
        self._version = opened.version
        self._events: asyncio.Queue[list[Event] | RequestError] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: RequestError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the prompt stream. Raises RequestError if it is refused."""
        self._reader = asyncio.create_task(self._read())
        try:
            await self._accepted
        except BaseException:
            await self.close()
            raise

    async def edit(self, ids: list[int], tail: int) -> None:
        """Replace the prompt with `ids`. Their last `tail` tokens are expected to stay last.

        Raises RequestError if the request was lost meanwhile.
        """
        retained = common_prefix(self.ids, ids)
        await self._sync(ids, retained, tail)
        self.computed = min(self.computed, retained)

    async def answer(
        self, ids: list[int], params: SamplingParams, reader: NewReader | None = None
    ) -> AsyncGenerator[Item, None]:
        """Finish the prompt as `ids`, and yield its output, as AsyncLLM.submit does.

        `params.max_tokens` must be set. If the prompt is answered early, yield the current answer, to its end
        once the prompt is finished. Raises RequestError if the request is lost, PromptChanged when the answer
        becomes void: then call this again.
        """
        stopwatch = Stopwatch(time.monotonic())
        if not self._opened.answer_early:
            await self._sync(ids, common_prefix(self.ids, ids), 0, params)
        request = self._opened.request
        items = read_items(
            self._steps(), self._runtime, self._tokenizer, request, ids, params, stopwatch, reader
        )
        async for item in items:
            yield replace(item, prompt_tokens=len(self.ids)) if isinstance(item, Usage) else item

    async def finish(self) -> None:
        """Finish the prompt without changes, so that an early answer becomes final.

        Raises RequestError if the request is lost.
        """
        await self._sync(self.ids, len(self.ids), 0, finish=True)

    async def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent.

        A pending `answer` raises RequestError.
        """
        if self._reader is not None and not self._reader.done():
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _sync(
        self,
        ids: list[int],
        retained: int,
        tail: int,
        params: SamplingParams | None = None,
        finish: bool = False,
    ) -> None:
        if self._error:
            raise self._error
        finish = finish or params is not None
        edit = ClientEdit(
            self._opened.request, self._version + 1, retained, ids[retained:], finish, params, tail
        )
        await self._runtime.edit(edit)
        self.ids = ids
        self._version += 1

    async def _steps(self) -> AsyncIterator[list[Event]]:
        while True:
            events = await self._events.get()
            if isinstance(events, RequestError):
                raise events
            if any(isinstance(event, OutputWithdrawn) for event in events):
                raise PromptChanged
            yield events

    async def _read(self) -> None:
        """Read the request's events. Progress updates `computed`; other events are queued for `answer`."""
        error = RequestError("the stream was closed", status=409)
        try:
            async with aclosing(self._runtime.submit(self._opened)) as steps:
                async for events in steps:
                    if not self._accepted.done():
                        self._accepted.set_result(None)
                    unread = [event for event in events if not self._is_progress(event)]
                    if any(isinstance(event, OutputWithdrawn) for event in unread):
                        self._discard_unread()
                    if unread:
                        self._events.put_nowait(unread)
        except RequestError as refused:
            self._error = error = refused
        finally:
            if not self._accepted.done():
                self._accepted.set_exception(error)
            self._events.put_nowait(error)

    def _discard_unread(self) -> None:
        """Discard unread events of a void answer."""
        while not self._events.empty():
            self._events.get_nowait()

    def _is_progress(self, event: Event) -> bool:
        if not isinstance(event, Progress):
            return False
        self.computed = event.computed
        return True
