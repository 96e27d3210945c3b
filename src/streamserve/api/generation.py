"""Runs a request: submits its prompts to the engine concurrently, and passes each item to its sink."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass

from streamserve.api.context import AppContext
from streamserve.api.generator import EnginePromptStream, Item
from streamserve.api.http.limits import check_choices
from streamserve.api.prompt import EncodedPrompt
from streamserve.protocol.errors import RequestError
from streamserve.protocol.request_options import NO_OPTIONS, RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.message import NewReader
from streamserve.text.output import ChoiceDelta, Usage


@dataclass(frozen=True)
class GenerationTask:
    """The generation task of the `number`-th prompt of a request.

    Its choices are numbered after the choices of the earlier prompts. `prompt_stream` is its prompt stream,
    if there is one; the request's latency then counts from the stream's creation. With `reader`, each choice
    is parsed as a chat reply.
    """

    number: int
    request_id: str
    prompt: EncodedPrompt
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    prompt_stream: EnginePromptStream | None = None
    reader: NewReader | None = None

    def index(self, choice: int) -> int:
        """Return the index that one of this task's choices has in the reply."""
        return self.number * self.params.n + choice


Sink = Callable[[GenerationTask, Item], Awaitable[None]]


def new_id(kind: str) -> str:
    """Return a new request id in OpenAI's format."""
    return f"{kind}-{secrets.token_hex(16)}"


async def generate(context: AppContext, tasks: Sequence[GenerationTask], sink: Sink) -> None:
    """Run all tasks concurrently and pass their items to `sink`. The first failure cancels the others.

    Raises RequestError if a task is refused, lost or times out. Cancelling this call cancels all tasks in the
    engine.
    """
    check_choices([task.params for task in tasks])
    seconds = context.settings.request_timeout
    try:
        with nullcontext() if any(task.prompt_stream for task in tasks) else context.drain.request():
            async with asyncio.timeout(seconds) as deadline:
                await _generate_all(context, tasks, sink)
    except TimeoutError:
        if not deadline.expired():
            raise
        message = f"the request took longer than {seconds:g} seconds, which is the limit (request_timeout)"
        raise RequestError(message, status=504) from None


async def _generate_all(context: AppContext, tasks: Sequence[GenerationTask], sink: Sink) -> None:
    if len(tasks) == 1:
        await _generate_one(context, tasks[0], sink)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(_generate_one(context, task, sink))
                await asyncio.sleep(0)  # starting a task takes a while: let other tasks run in between
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the other errors are cancellations


async def _generate_one(context: AppContext, task: GenerationTask, sink: Sink) -> None:
    prompt_stream = task.prompt_stream
    created = prompt_stream.created if prompt_stream else None
    length, max_tokens = len(task.prompt.ids), task.params.max_tokens
    limit = context.llm.model.max_model_len - length if max_tokens is None else max_tokens
    with context.metrics.request(length, task.params.n, limit, created) as recorder:
        async with aclosing(_items(context, task)) as stream:
            async for item in stream:
                if isinstance(item, ChoiceDelta):
                    recorder.delta(item)
                    _check(item)
                elif isinstance(item, Usage):
                    recorder.usage(item, task.params.slo)
                await sink(task, item)


def _items(context: AppContext, task: GenerationTask) -> AsyncGenerator[Item, None]:
    if task.prompt_stream:
        return task.prompt_stream.answer(task.prompt.ids, task.params, task.reader)
    return context.llm.submit(
        task.prompt.ids,
        task.params,
        request_id=task.request_id,
        options=task.options,
        reader=task.reader,
    )


def _check(delta: ChoiceDelta) -> None:
    """Raise RequestError (503) for finish reasons that OpenAI's API lacks: they are server errors."""
    if delta.finish in ("abort", "error"):
        raise RequestError("the server ended this request before it was complete", status=503)
