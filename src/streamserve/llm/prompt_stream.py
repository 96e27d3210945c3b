"""A prompt stream in the engine: edits are synced to it, and it prefills the prompt while it arrives.

With early answers it generates from the first tokens on; an edit that changes the prompt voids the answer.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from streamserve.fleet.events import Edit, Open
from streamserve.fleet.runtime import FleetRuntime
from streamserve.llm.items import Item, read_items
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.protocol.messages import Event, Progress, Withdrawn
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import Stopwatch
from streamserve.text.output import Usage
from streamserve.text.retokenize import common_prefix
from streamserve.text.tokenizer import Tokenizer


class OpenPrompt:
    """One request with an open prompt. `start` it, `edit` it, `answer` it once; always `close` it.

    `ids` are the token ids last synced to the engine; `computed` of them have KV, by its latest report.
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
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: RequestError | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the request. Raises RequestError if it is refused."""
        self._reading = asyncio.create_task(self._read())
        try:
            await self._taken
        except BaseException:
            await self.close()
            raise

    async def edit(self, ids: list[int], tail: int) -> None:
        """Replace the prompt with `ids`, of which the last `tail` are expected to stay last.

        Raises RequestError if the request was lost meanwhile.
        """
        keep = common_prefix(self.ids, ids)
        await self._tell(ids, keep, tail)
        self.computed = min(self.computed, keep)

    async def answer(self, ids: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        """Finish the prompt as `ids`, and yield its output; the last item is a Usage.

        `params.max_tokens` must be set. For a prompt that is answered early, yields the current answer, to
        its end once the prompt is finished. Raises RequestError if the request is lost, PromptChanged when
        the answer becomes void: then call this again.
        """
        watch = Stopwatch(time.monotonic())
        if not self._opened.answer_early:
            await self._tell(ids, common_prefix(self.ids, ids), 0, params)
        items = read_items(
            self._steps(), self._runtime, self._tokenizer, self._opened.request, len(ids), params, watch
        )
        async for item in items:
            yield replace(item, prompt_tokens=len(self.ids)) if isinstance(item, Usage) else item

    async def finish(self) -> None:
        """Finish the prompt without changes, so that an early answer becomes final.

        Raises RequestError if the request is lost.
        """
        await self._tell(self.ids, len(self.ids), 0, finish=True)

    async def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent.

        A pending `answer` raises RequestError.
        """
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _tell(
        self,
        ids: list[int],
        keep: int,
        tail: int,
        params: SamplingParams | None = None,
        finish: bool = False,
    ) -> None:
        if self._lost:
            raise self._lost
        finish = finish or params is not None
        edit = Edit(self._opened.request, self._version + 1, keep, ids[keep:], finish, params, tail)
        await self._runtime.edit(edit)
        self.ids = ids
        self._version += 1

    async def _steps(self) -> AsyncIterator[list[Event]]:
        while True:
            news = await self._events.get()
            if isinstance(news, RequestError):
                raise news
            if any(isinstance(event, Withdrawn) for event in news):
                raise PromptChanged
            yield news

    async def _read(self) -> None:
        """Read the request's events: progress updates `computed`, others are queued for `answer`."""
        error = RequestError("the stream was closed", status=409)
        try:
            async with aclosing(self._runtime.submit(self._opened)) as steps:
                async for events in steps:
                    if not self._taken.done():
                        self._taken.set_result(None)
                    rest = [event for event in events if not self._is_progress(event)]
                    if any(isinstance(event, Withdrawn) for event in rest):
                        self._forget()
                    if rest:
                        self._events.put_nowait(rest)
        except RequestError as refused:
            self._lost = error = refused
        finally:
            if not self._taken.done():
                self._taken.set_exception(error)
            self._events.put_nowait(error)

    def _forget(self) -> None:
        """Discard unread events of a void answer."""
        while not self._events.empty():
            self._events.get_nowait()

    def _is_progress(self, event: Event) -> bool:
        if not isinstance(event, Progress):
            return False
        self.computed = event.computed
        return True
