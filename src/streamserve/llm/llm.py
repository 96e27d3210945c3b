"""The library for scripts: `LLM("embedded").generate(["Hello"])`, with results in vLLM's shape."""

import asyncio
import operator
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

from streamserve.llm.async_llm import AsyncLLM, new_request_id
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import ModelInfo, PromptLogprobs
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import Settings, resolve
from streamserve.text.chat import require
from streamserve.text.latency import SloOutcome
from streamserve.text.output import Delta, Usage
from streamserve.text.tokenizer import Tokenizer

T = TypeVar("T")

CLOSE_SECONDS = 60.0
"""Longer than any worker takes to end, or to be ended."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at a position, and its text."""

    logprob: float
    decoded_token: str


@dataclass
class CompletionOutput:
    """One output choice. `logprobs[i]` maps token ids to log-probabilities at output position i."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """What a prompt came to. `prompt_logprobs[0]` is None: nothing comes before the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    slo: SloOutcome | None = None
    finished: bool = False


Prompt = str | Sequence[int]


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_cancel_all())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _cancel_all() -> None:
    """End the tasks of calls that were interrupted."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stop the workers, then the loop. Whoever collects an LLM that nobody closed may be the loop's thread,
    or hold a lock that the loop needs: so there is a limit to waiting. In a fork there is no such thread."""
    if not thread.is_alive():
        return
    closing = asyncio.run_coroutine_threadsafe(llm.close(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:
        closing.result(CLOSE_SECONDS)
        thread.join()


class LLM:
    """A model for scripts: `LLM("embedded").generate(["Hello"])`. Close it, or use it in a `with` block, to
    free its memory; it is closed at the latest when it is collected, or Python ends.

    Takes the settings of `streamserve serve` as keyword arguments. Raises SettingsError for a bad one,
    CheckpointError for a model that cannot be served, StartError if the worker ends before it is ready.
    """

    def __init__(self, model: str | None = None, *, config: str | None = None, **settings: Any) -> None:
        self._start(resolve(model, settings, config))

    @classmethod
    def from_settings(cls, settings: Settings) -> "LLM":
        """An LLM with settings that are resolved already."""
        llm = cls.__new__(cls)
        llm._start(settings)
        return llm

    def _start(self, settings: Settings) -> None:
        self._llm = AsyncLLM(settings)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_and_close, args=(self._loop,), name="streamserve", daemon=True)
        thread.start()
        try:
            self._thread = thread
            self._run(self._llm.start()).result()
        except BaseException:
            _end(self._llm, self._loop, thread)
            raise
        # When Python ends the newest goes first: this one before what frees the socket that it still needs.
        self._end = weakref.finalize(self, _end, self._llm, self._loop, thread)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def model(self) -> ModelInfo:
        return self._llm.model

    def report(self) -> Report | None:
        """The worker's latest report."""
        return self._llm.report()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Outputs for texts or lists of token ids, in their order; `params` for all of them or one each, and
        so `priority` (lower goes first). Raises RequestError for the first prompt that is refused, or that
        ends its worker again and again; StartError while no worker can be started."""
        many = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(each)} sampling parameters")
        urgency = [priority] * len(many) if isinstance(priority, int) else list(priority)
        if len(urgency) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(urgency)} priorities")
        running = self._run(self._generate(many, each, urgency, use_tqdm))
        try:
            return running.result()
        except BaseException:  # Ctrl-C: nothing goes on for a call that is over
            running.cancel()
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several, rendered by the checkpoint's chat template."""
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render(chat) for chat in chats]  # type: ignore[arg-type]
        params = params or SamplingParams(max_tokens=None)
        return self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Pieces of one prompt's output as they come. Leaving the loop early cancels the request."""
        queue: asyncio.Queue[Delta | None] = asyncio.Queue()

        async def read() -> None:
            try:
                ids = self._encode(prompt)
                await self._llm.until_ready()
                items = self._llm.submit(ids, params or SamplingParams(), request_id=new_request_id())
                async with aclosing(items) as stream:
                    async for item in stream:
                        if isinstance(item, Delta):
                            queue.put_nowait(item)
            finally:
                queue.put_nowait(None)

        reading = self._run(read())
        try:
            while (delta := self._run(queue.get()).result()) is not None:
                yield delta
            reading.result()
        finally:
            reading.cancel()

    def render(self, chat: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation, as token ids. Raises RequestError if the template refuses it."""
        text = require(self._llm.chat_template).render(chat)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """Stop the worker and free everything; harmless when closed already."""
        self._end()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it in the loop's thread. Raises RuntimeError if there is none: closed, or in a fork."""
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("this LLM is closed, or belongs to the process that this one was forked from")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or as given: integers of any kind. Raises TypeError for anything else."""
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt)
            except UnicodeEncodeError:
                raise RequestError("the prompt holds a lone surrogate", field="prompt") from None
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise TypeError(f"a prompt is a text or token ids, not {type(prompt).__name__}") from None

    async def _generate(
        self, prompts: list[Prompt], params: list[SamplingParams], priorities: list[int], show: bool
    ) -> list[RequestOutput]:
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        limit = asyncio.Semaphore(self._llm.settings.server.max_requests)
        with Progress(*columns, disable=not show) as progress:
            bar = progress.add_task("prompts", total=len(prompts))

            async def one(prompt: Prompt, param: SamplingParams, priority: int) -> RequestOutput:
                async with limit:
                    output = await self._collect(prompt, param, priority)
                progress.advance(bar)
                return output

            try:
                async with asyncio.TaskGroup() as group:
                    each = zip(prompts, params, priorities, strict=True)
                    tasks = [group.create_task(one(*wanted)) for wanted in each]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the others were cancelled because of it
        return [task.result() for task in tasks]

    async def _collect(self, prompt: Prompt, params: SamplingParams, priority: int) -> RequestOutput:
        ids = self._encode(prompt)
        output = RequestOutput(
            request_id=new_request_id(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(choice) for choice in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        await self._llm.until_ready()  # a worker that died may be on its way back
        items = self._llm.submit(ids, params, request_id=output.request_id, priority=priority)
        async with aclosing(items) as items:
            async for item in items:
                self._add(output, item)
        output.finished = True
        return output

    def _add(self, output: RequestOutput, item: Delta | PromptLogprobs | Usage) -> None:
        if isinstance(item, Usage):
            output.num_cached_tokens, output.slo = item.cached_tokens, item.slo
        elif isinstance(item, PromptLogprobs):
            assert output.prompt_logprobs is not None
            for entry in item.entries:
                pairs = [(entry.token, entry.logprob), *((top.token, top.logprob) for top in entry.top)]
                output.prompt_logprobs.append(self._logprobs(pairs))
        else:
            choice = output.outputs[item.choice]
            choice.text += item.text
            choice.token_ids += item.tokens
            choice.finish_reason, choice.stop_reason = item.finish, item.stop
            for one in item.logprobs:
                choice.logprobs = choice.logprobs or []
                pairs = [(one.token, one.logprob), *((top.token, top.logprob) for top in one.top)]
                choice.logprobs.append(self._logprobs(pairs))

    def _logprobs(self, pairs: list[tuple[int, float]]) -> dict[int, Logprob]:
        return {token: Logprob(value, self.tokenizer.token_text(token)) for token, value in pairs}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. Token ids are whatever counts as integers, as in arrays."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
