"""Runs a request: submits its prompts to the engine concurrently, and passes each item to its sink."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamserve.api.generator import EnginePromptStream, Generator, Item
from streamserve.api.http.descriptors import Descriptors, client_descriptors
from streamserve.api.http.drain import Drain
from streamserve.api.http.json_scan import MAX_VALUES, MIN_CHARACTERS
from streamserve.api.http.limits import check_choices
from streamserve.api.http.memory import Charge, MemoryAccount
from streamserve.api.http.side_thread import SideThread
from streamserve.api.openai.prompts import Prompt
from streamserve.api.openai.replies import ChatReply, CompletionReply
from streamserve.api.openai.reply_size import REPEATED_BYTES, encoded
from streamserve.api.openai.response_store import ResponseStore
from streamserve.api.openai.scores import PromptScores, charge_delta, reply_charge
from streamserve.api.ops.metrics import Metrics
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import FinishReason, PromptLogprobs
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta, TokenLogprob, Usage

if TYPE_CHECKING:
    from streamserve.api.on_demand import Models


@dataclass(frozen=True)
class AppContext:
    """The application context that every route needs.

    - `side_thread`: runs work that takes more than a few milliseconds.
    - `grammar_thread`: converts grammars. Each may take a second; in a separate thread, they delay only each
      other.
    - `stored`: responses that are kept.
    - `models`: if set, models are loaded on demand, and `llm` is the default model (on_demand.py).
    """

    llm: Generator
    settings: ApiSettings
    metrics: Metrics
    memory: MemoryAccount
    descriptors: Descriptors = field(default_factory=client_descriptors)
    stored: ResponseStore = field(default_factory=ResponseStore)
    drain: Drain = field(default_factory=Drain)
    side_thread: SideThread = field(default_factory=SideThread)
    grammar_thread: SideThread = field(default_factory=SideThread)
    models: "Models | None" = None

    def cache_salt(self, caller: str, requested: str | None) -> str:
        """Return the cache salt of a caller's request with the salt `requested`. With several tenants, each
        has separate cached prefixes, unless the operator lets them share prefixes."""
        salt = requested or ""
        if self.settings.share_prefixes or not self.settings.several_tenants:
            return salt
        return f"{caller}\0{salt}"

    @property
    def max_values(self) -> int:
        """The maximum number of JSON values in a request: prompts of token ids may fill the context."""
        return max([MAX_VALUES, *(2 * length for length, _ in self._contexts)])

    @property
    def max_characters(self) -> int:
        """The maximum number of characters in a string of a request: no prompt that fits in the context is
        longer. All other strings have far lower limits."""
        longest = [length * llm.tokenizer.longest_token for length, llm in self._contexts]
        return max([MIN_CHARACTERS, *longest]) if longest else sys.maxsize

    @property
    def _contexts(self) -> list[tuple[int, Generator]]:
        """The context lengths of all models. Empty if the only model is not loaded."""
        if self.models is not None:
            lengths = self.models.max_model_len
            return [(lengths[name], context.llm) for name, context in self.models.contexts.items()]
        try:
            return [(self.llm.model.max_model_len, self.llm)]
        except RequestError:
            return []


@dataclass(frozen=True)
class GenerationTask:
    """The generation task of the `number`-th prompt of a request.

    Its choice indices follow the indices of the prompts before it. `prompt_stream` is its prompt stream, if
    there is one; the request's latency then counts from the stream's creation. `adapter` is the name of its
    LoRA adapter. `idempotency_key` is the request's key, if it has one.
    """

    number: int
    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str
    prompt_stream: EnginePromptStream | None = None
    adapter: str = ""
    idempotency_key: str = ""

    def index(self, choice: int) -> int:
        """Return the index in the reply of one of its choices."""
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
                if isinstance(item, Delta):
                    recorder.delta(item)
                    _check(item)
                elif isinstance(item, Usage):
                    recorder.usage(item, task.params.slo)
                await sink(task, item)


def _items(context: AppContext, task: GenerationTask) -> AsyncGenerator[Item, None]:
    if task.prompt_stream:
        return task.prompt_stream.answer(task.prompt.ids, task.params)
    return context.llm.submit(
        task.prompt.ids,
        task.params,
        request_id=task.request_id,
        priority=task.priority,
        cache_salt=task.cache_salt,
        adapter=task.adapter,
        idempotency_key=task.idempotency_key,
    )


def _check(delta: Delta) -> None:
    """Raise RequestError (503) for finish reasons that OpenAI's API lacks: they are server errors."""
    if delta.finish in ("abort", "error"):
        raise RequestError("the server ended this request before it was complete", status=503)


@dataclass
class Piece:
    """The output of a choice: complete, or one delta."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish, self.stop = delta.finish, delta.stop


@dataclass
class GenerationOutput:
    """All output of a task."""

    task: GenerationTask
    choices: list[Piece]
    prompt_logprobs: PromptScores = field(default_factory=PromptScores)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def add(self, item: Item) -> None:
        """Add an item."""
        if isinstance(item, Usage):
            self.usage = item
        elif isinstance(item, PromptLogprobs):
            self.prompt_logprobs.append(item.entries)
        elif isinstance(item, Delta):
            self.choices[item.choice].add(item)


def charged_reply(context: AppContext, tasks: Sequence[GenerationTask], whole: bool) -> Charge:
    """Return the charge for a reply to `tasks`, including log-probabilities of prompts; see
    scores.reply_charge."""
    return reply_charge(
        context.memory,
        [task.params for task in tasks],
        [len(task.prompt.ids) for task in tasks],
        context.llm.model.max_model_len,
        whole,
    )


async def collect(
    context: AppContext,
    tasks: Sequence[GenerationTask],
    write: Callable[[list[GenerationOutput]], CompletionReply | ChatReply],
    repeated: int = 0,
) -> bytes:
    """Run all tasks to their end; return the reply that `write` builds from their outputs, as JSON.

    `repeated` is the number of characters of prompts in the reply (reply_size.py). A large reply is built and
    encoded outside of the event loop.
    """
    outputs = [GenerationOutput(task, [Piece() for _ in range(task.params.n)]) for task in tasks]
    with charged_reply(context, tasks, whole=True) as charge:
        charge.add(REPEATED_BYTES * repeated)

        async def collect_item(task: GenerationTask, item: Item) -> None:
            if isinstance(item, Delta):
                charge_delta(charge, item)
            outputs[task.number].add(item)

        await generate(context, tasks, collect_item)
        return await context.side_thread.run_if(charge.held > _LARGE_REPLY, lambda: encoded(write(outputs)))


_LARGE_REPLY = 256 << 10
"""A reply with a larger charge, in bytes, takes more than a millisecond to encode."""


@dataclass(frozen=True)
class Head:
    """The fields at the start of every reply to a request."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def head_of(request_id: str, llm: Generator, model: str) -> Head:
    """Return the head for a request that has just arrived."""
    adapter = llm.adapters.get(model)
    fingerprint = llm.model.fingerprint_with(adapter.fingerprint if adapter else "")
    return Head(request_id, int(time.time()), model, fingerprint)
