"""Run a request: submit its prompts to the engine concurrently, and pass each item to its sink."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

import msgspec

from streamserve.api.generator import ArrivingPrompt, Generator, Item
from streamserve.api.http.drain import Drain
from streamserve.api.http.json_scan import MAX_VALUES, MIN_CHARACTERS
from streamserve.api.http.limits import check_choices
from streamserve.api.http.memory import Charge, MemoryAccount
from streamserve.api.http.side_thread import SideThread
from streamserve.api.openai.prompts import Prompt
from streamserve.api.openai.scores import PromptScores, charge_delta, reply_charge
from streamserve.api.ops.metrics import Metrics
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import FinishReason, PromptLogprobs
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta, TokenLogprob, Usage


@dataclass(frozen=True)
class AppContext:
    """The application context that every route needs.

    `side` runs work that takes more than a few milliseconds; `forms` converts grammars, each of which may
    take a second, so that they delay only each other.
    """

    llm: Generator
    settings: ApiSettings
    metrics: Metrics
    memory: MemoryAccount
    drain: Drain = field(default_factory=Drain)
    side: SideThread = field(default_factory=SideThread)
    forms: SideThread = field(default_factory=SideThread)

    @property
    def max_values(self) -> int:
        """The maximum number of JSON values in a request: prompts of token ids may fill the context."""
        try:
            return max(MAX_VALUES, 2 * self.llm.model.max_model_len)
        except RequestError:  # not loaded yet
            return MAX_VALUES

    @property
    def max_characters(self) -> int:
        """The maximum number of characters in a string of a request: a prompt that fits in the context has no
        more, and every other string has a far lower limit."""
        try:
            return max(MIN_CHARACTERS, self.llm.model.max_model_len * self.llm.tokenizer.longest_token)
        except RequestError:
            return sys.maxsize


@dataclass(frozen=True)
class GenerationTask:
    """The generation task of the `number`-th prompt of a request.

    Its choice indices follow those of the prompts before it. `arriving` is its prompt stream, if there is
    one; the request's latency then counts from that stream's creation.
    """

    number: int
    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str
    arriving: ArrivingPrompt | None = None

    def index(self, choice: int) -> int:
        """Return the index of one of its choices in the reply."""
        return self.number * self.params.n + choice


Sink = Callable[[GenerationTask, Item], Awaitable[None]]


def new_id(kind: str) -> str:
    """Return a new request id in OpenAI's format."""
    return f"{kind}-{secrets.token_hex(16)}"


async def generate(door: AppContext, jobs: Sequence[GenerationTask], sink: Sink) -> None:
    """Run all jobs concurrently and pass their items to `sink`. The first failure cancels the others.

    Raises RequestError if one is refused, lost or times out. Cancelling this cancels all of them in the
    engine.
    """
    check_choices([job.params for job in jobs])
    seconds = door.settings.request_timeout
    try:
        with nullcontext() if any(job.arriving for job in jobs) else door.drain.request():
            async with asyncio.timeout(seconds) as deadline:
                await _generate_all(door, jobs, sink)
    except TimeoutError:
        if not deadline.expired():
            raise
        message = f"the request took longer than {seconds:g} seconds, which is the limit (request_timeout)"
        raise RequestError(message, status=504) from None


async def _generate_all(door: AppContext, jobs: Sequence[GenerationTask], sink: Sink) -> None:
    if len(jobs) == 1:
        await _generate_one(door, jobs[0], sink)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(_generate_one(door, job, sink))
                await asyncio.sleep(0)  # starting one takes a while: let other tasks run in between
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others were cancelled because of this one


async def _generate_one(door: AppContext, job: GenerationTask, sink: Sink) -> None:
    arriving = job.arriving
    created = arriving.created if arriving else None
    with door.metrics.request(len(job.prompt.ids), job.params.n, created) as watch:
        async with aclosing(_items(door, job)) as stream:
            async for item in stream:
                if isinstance(item, Delta):
                    watch.delta(item)
                    _check(item)
                elif isinstance(item, Usage):
                    watch.usage(item, job.params.slo)
                await sink(job, item)


def _items(door: AppContext, job: GenerationTask) -> AsyncGenerator[Item, None]:
    if job.arriving:
        return job.arriving.answer(job.prompt.ids, job.params)
    return door.llm.submit(
        job.prompt.ids,
        job.params,
        request_id=job.request_id,
        priority=job.priority,
        cache_salt=job.cache_salt,
    )


def _check(delta: Delta) -> None:
    """Raise RequestError (503) for finish reasons that OpenAI does not have: they are server errors."""
    if delta.finish in ("abort", "error"):
        raise RequestError("the server ended this request before it was complete", status=503)


@dataclass
class Piece:
    """The output of a choice: all of it, or one delta."""

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
    """All output of a job."""

    job: GenerationTask
    choices: list[Piece]
    prompt_logprobs: PromptScores = field(default_factory=PromptScores)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def add(self, item: Item) -> None:
        """Add an item."""
        if isinstance(item, Usage):
            self.usage = item
        elif isinstance(item, PromptLogprobs):
            self.prompt_logprobs.append(item.entries)
        else:
            self.choices[item.choice].add(item)


def charged_reply(door: AppContext, jobs: Sequence[GenerationTask], whole: bool) -> Charge:
    """Return the charge for the log-probabilities of a reply to `jobs`; see scores.reply_charge."""
    return reply_charge(
        door.memory,
        [job.params for job in jobs],
        [len(job.prompt.ids) for job in jobs],
        door.llm.model.max_model_len,
        whole,
    )


async def collect(
    door: AppContext,
    jobs: Sequence[GenerationTask],
    write: Callable[[list[GenerationOutput]], msgspec.Struct],
) -> bytes:
    """Run all jobs to their end; return the reply that `write` builds from their outputs, as JSON.

    A reply with many log-probabilities is encoded outside of the event loop.
    """
    outputs = [GenerationOutput(job, [Piece() for _ in range(job.params.n)]) for job in jobs]
    with charged_reply(door, jobs, whole=True) as charge:

        async def take(job: GenerationTask, item: Item) -> None:
            if isinstance(item, Delta):
                charge_delta(charge, item)
            outputs[job.number].add(item)

        await generate(door, jobs, take)
        return await door.side.run_if(charge.held > _LARGE_REPLY, lambda: msgspec.json.encode(write(outputs)))


_LARGE_REPLY = 1 << 20
"""Bytes of log-probabilities that take several milliseconds to encode."""


@dataclass(frozen=True)
class Head:
    """The fields at the start of every reply to a request."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def head_of(request_id: str, llm: Generator, model: str) -> Head:
    """Return the head for a request that has just arrived."""
    return Head(request_id, int(time.time()), model, f"fp_{llm.model.fingerprint[:12]}")
