"""Prompt streams: prompts that arrive in chunks. Each edit is synced to the engine; finishing one answers it.

create ─▶ open ── edit, edit, … ──▶ finish ─▶ answering ─▶ gone
            └── delete, or no request for stream_ttl seconds ──▶ gone

An early answer may be read while the stream is open: each change withdraws what was read.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec

from streamserve.api.generation import AppContext, GenerationTask, new_id
from streamserve.api.generator import ArrivingPrompt
from streamserve.api.http.memory import TOKEN_BYTES, Charge
from streamserve.api.http.sse import Emit
from streamserve.api.openai.conversation import LARGE_REQUEST
from streamserve.api.openai.prompts import Prompt
from streamserve.api.ops.models import served_name
from streamserve.api.prompt_streams.schemas import (
    AnswerRequest,
    ChunkState,
    EditReply,
    EditRequest,
    FinishRequest,
    StreamReply,
    StreamRequest,
    StreamState,
    WithdrawnReply,
)
from streamserve.api.prompt_streams.template import Answer, Form, behind_context, form_of
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.text.arriving import Context
from streamserve.text.retokenize import APART, NOTHING, Retokenizer, Tokenized, common_prefix

_MANY_CHUNKS = 256
"""Chunks, or operations on them, that take a millisecond or more to edit."""

_CHUNK_BYTES = 200
"""Memory overhead of a chunk in bytes, besides its text."""

_RETRY_AFTER = 5.0


class PromptStream:
    """One stream. Its methods raise RequestError, and then nothing has changed.

    `charge` covers the memory of its request, and of the prompt: its text, as chunks and as a whole, and its
    tokens.
    """

    def __init__(
        self,
        name: str,
        model: str,
        door: AppContext,
        form: Form,
        prompt: ArrivingPrompt,
        retokenizer: Retokenizer,
        charge: Charge,
        early: bool,
    ) -> None:
        self._size = charge.held
        self._large = self._size > LARGE_REQUEST
        self.name = name
        self.early = early
        self.reading = False
        """Whether a client reads its early answer."""
        self.answering = False
        self.touched = time.monotonic()
        self.prompt = prompt
        self._model = model
        self._created = int(time.time())
        self._door = door
        self._form = form
        self._retokenizer = retokenizer
        self._charge = charge
        self._behind = ""
        self._context = Context()
        self._tokenized = NOTHING
        self._one_at_a_time = asyncio.Lock()

    @property
    def wants_events(self) -> bool:
        """Whether the create request asked for a streamed answer."""
        return self._form.wants_events

    @property
    def version(self) -> int:
        """The number of edits so far."""
        return self._context.version

    async def begin(self) -> None:
        """Sync the text before the first chunk to the engine."""
        self._behind = await self._door.side.run_if(self._large, lambda: behind_context(self._form))
        self._tokenized = await self._tell(self._context)

    async def edit(self, wanted: EditRequest) -> EditReply:
        """Apply an edit."""
        async with self._one_at_a_time:
            self._check_open(wanted.version)
            large = len(self._context.chunks) > _MANY_CHUNKS or len(wanted.operations) > _MANY_CHUNKS
            before = self._context
            context, touched = await self._door.side.run_if(large, lambda: before.edited(wanted.operations))
            self._tokenized = await self._tell(context)
            self._door.metrics.stream_chunks.inc(context.made - self._context.made)
            self._context = context
            return EditReply(id=self.name, version=context.version, chunks=touched)

    async def finish(self, wanted: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Close the stream to edits; return the answer and the job for its current prompt."""
        async with self._one_at_a_time:
            self._check_open(wanted.version)
            answer, job = await self._answer(wanted)
            params = self._door.llm.complete(job.prompt.ids, job.params)
            if self.early:
                await self.prompt.finish()
            self.answering = True
            return answer, replace(job, params=params)

    async def read(self) -> None:
        """Mark the early answer as read by a client; only one client may read it."""
        async with self._one_at_a_time:
            self._check_open(None)
            if not self.early:
                raise RequestError("the stream was not made with answer_early", status=409)
            if self.reading:
                raise RequestError("somebody reads this answer already", status=409)
            self.reading = True

    async def as_it_stands(self, wanted: FinishRequest) -> tuple[Answer, GenerationTask, int]:
        """Return the answer and the job for the current early answer, and the prompt's version."""
        async with self._one_at_a_time:
            return *await self._answer(wanted), self._context.version

    async def _answer(self, wanted: FinishRequest) -> tuple[Answer, GenerationTask]:
        prompt = Prompt(self.prompt.ids, self._tokenized.text)
        answer, job = await self._form.answer(prompt, wanted)
        return answer, replace(job, arriving=self.prompt)

    def state(self) -> StreamState:
        """Return the state of the stream."""
        self.touched = time.monotonic()
        chunks = [ChunkState(chunk.id, len(chunk.text)) for chunk in self._context.chunks]
        return StreamState(
            id=self.name,
            created=self._created,
            model=self._model,
            status="answering" if self.answering else "open",
            version=self._context.version,
            chunks=chunks,
            tokens=len(self.prompt.ids),
            computed=self.prompt.computed,
        )

    def _check_open(self, version: int | None) -> None:
        self.touched = time.monotonic()
        if self.answering:
            raise RequestError(f"stream {self.name} is finished", status=409)
        if version is not None:
            self._context.check(version)

    async def _tell(self, context: Context) -> Tokenized:
        """Tokenize the prompt with `context`, and sync it to the engine."""
        limit, tokenizer = self._door.llm.model.max_model_len, self._door.llm.tokenizer
        self._check_length(sum(len(chunk.text) for chunk in context.chunks))
        held = self._charge.held
        try:
            tokenized, tail = await self._tokenize(context)
            before, behind = tokenizer.surroundings if self._form.add_special_tokens else ([], [])
            ids = before + tokenized.ids + behind
            if len(ids) > limit:
                raise RequestError(
                    f"the prompt would have {len(ids)} tokens, but the model's context holds {limit}",
                    field="operations",
                )
            await self.prompt.edit(ids, tail + len(behind))
        except BaseException:
            self._charge.set(held)
            raise
        return tokenized

    def _check_length(self, characters: int) -> None:
        limit = self._door.llm.model.max_model_len
        if characters > limit * self._door.llm.tokenizer.longest_token:
            raise RequestError(
                f"the prompt would have {characters} characters, far more than a context of {limit} holds",
                field="operations",
            )

    async def _tokenize(self, context: Context) -> tuple[Tokenized, int]:
        """Return the prompt's tokens, charged, and how many of the last ones come after the context."""
        chunks = len(context.chunks)
        texts = sum(sys.getsizeof(chunk.text) for chunk in context.chunks)
        base = self._size + texts + _CHUNK_BYTES * chunks
        self._charge.set(max(self._charge.held, base + 2 * texts))
        large = self._large or texts > APART or chunks > _MANY_CHUNKS
        tokenized, tail = await self._door.side.run_if(large, lambda: self._encode(context))
        self._charge.set(base + sys.getsizeof(tokenized.text) + 2 * TOKEN_BYTES * len(tokenized.ids))
        return tokenized, tail

    def _encode(self, context: Context) -> tuple[Tokenized, int]:
        text = self._form.text(context.text)
        self._check_length(len(text))
        tokenized = self._retokenizer.encode(text, self._tokenized)
        if not (self._behind and text.endswith(self._behind)):
            return tokenized, 0
        ahead = self._retokenizer.encode(text[: -len(self._behind)], tokenized)
        return tokenized, len(tokenized.ids) - common_prefix(ahead.ids, tokenized.ids)


class Streams:
    """All open prompt streams of a server."""

    def __init__(self, door: AppContext) -> None:
        self._door = door
        self._retokenizer = Retokenizer(door.llm.tokenizer)
        self._streams: dict[str, PromptStream] = {}
        self._held: dict[str, ExitStack] = {}

    async def create(self, wanted: StreamRequest, size: int) -> StreamReply:
        """Create a stream, whose request takes `size` bytes.

        Raises RequestError if too many are open, or naming the field at fault.
        """
        llm = self._door.llm
        model = served_name(llm, wanted.model)
        name = new_id("stream")
        with ExitStack() as held:
            held.enter_context(self._door.drain.request())
            self._take_place(name, held)
            charge = held.enter_context(self._door.memory.charge())
            charge.add(size)
            form = form_of(self._door, wanted)
            text = await self._door.side.run_if(size > LARGE_REQUEST, lambda: form.text(""))
            _, job = await form.answer(Prompt([0], text), FinishRequest())  # validates all fields now
            prompt = await llm.open(
                job.params,
                request_id=name,
                priority=wanted.priority,
                cache_salt=wanted.cache_salt,
                answer_early=wanted.answer_early,
            )
            stream = PromptStream(
                name, model, self._door, form, prompt, self._retokenizer, charge, wanted.answer_early
            )
            try:
                await stream.begin()
            except BaseException:
                await prompt.close()
                raise
            self._streams[name] = stream
            self._held[name] = held.pop_all()
        self._watch(stream)
        return StreamReply(id=name)

    def _take_place(self, name: str, held: ExitStack) -> None:
        """Count one more stream as open, until `held` is closed."""
        limit = self._door.settings.max_streams
        if len(self._held) >= limit:
            raise RequestError(
                f"{limit} prompts are arriving already, which is the limit (max_streams)",
                status=429,
                retry_after=_RETRY_AFTER,
            )
        self._held[name] = held
        self._door.metrics.streams.inc()
        held.callback(self._door.metrics.streams.dec)
        held.callback(self._held.pop, name, None)

    def names(self) -> set[str]:
        """Return the names of the open streams."""
        return set(self._streams)

    def wants_events(self, name: str, wanted: FinishRequest) -> bool:
        """Return whether the reply to a finish request is a stream of events."""
        if name in self._streams and self._streams[name].reading:
            return False
        if wanted.stream is None:
            return name in self._streams and self._streams[name].wants_events
        return wanted.stream

    def get(self, name: str) -> PromptStream:
        """Return a stream by name. Raises RequestError (404) if there is none."""
        if name not in self._streams:
            gone = "it is finished, deleted or expired"
            raise RequestError(f"there is no stream {name[:64]!r}: {gone}", status=404)
        return self._streams[name]

    async def finish(self, name: str, wanted: FinishRequest) -> bytes:
        """Finish a stream and return the whole answer; only confirm if a client reads its early answer."""
        stream = self.get(name)
        answer, job = await stream.finish(wanted)
        if stream.reading:
            return msgspec.json.encode(StreamReply(id=name, version=stream.version))
        try:
            while True:
                try:
                    return await answer.whole([job])
                except PromptChanged:  # by an edit before the stream was finished
                    answer, job, _ = await stream.as_it_stands(wanted)
        finally:
            await self._end(stream)

    async def finish_streaming(
        self, name: str, wanted: FinishRequest
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        """Finish a stream; return the function that sends its answer as events. It must be called."""
        stream = self.get(name)
        answer, job = await stream.finish(wanted)

        async def produce(emit: Emit) -> None:
            try:
                await self._send(stream, wanted, answer, job, emit)
            finally:
                await self._end(stream)

        return produce

    async def answer_early(
        self, name: str, wanted: AnswerRequest
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        """Return the function that sends the early answer as events, until the stream is finished.

        It must be called. Raises RequestError (409) if the stream has no early answer, or if a client reads
        it already.
        """
        stream = self.get(name)
        await stream.read()
        options = FinishRequest(stream=True, stream_options=wanted.stream_options)

        async def produce(emit: Emit) -> None:
            try:
                answer, job, _ = await stream.as_it_stands(options)
                await self._send(stream, options, answer, job, emit)
            finally:
                await self._end(stream)

        return produce

    async def _send(
        self, stream: PromptStream, wanted: FinishRequest, answer: Answer, job: GenerationTask, emit: Emit
    ) -> None:
        """Send the events of an answer; when it is withdrawn, send an event for that, and start again."""
        sent = 0

        async def count(event: msgspec.Struct) -> None:
            nonlocal sent
            sent += 1
            await emit(event)

        while True:
            try:
                return await answer.stream([job], count)
            except PromptChanged:
                answer, job, version = await stream.as_it_stands(wanted)
                if sent:
                    await emit(WithdrawnReply(id=stream.name, version=version))
                sent = 0

    async def delete(self, name: str) -> None:
        """Delete a stream; if it is being answered, its client gets an error. Raises RequestError (404)."""
        await self._end(self.get(name))

    async def _end(self, stream: PromptStream) -> None:
        if self._streams.pop(stream.name, None) is not None:
            self._held[stream.name].close()
            await stream.prompt.close()

    def _watch(self, stream: PromptStream) -> None:
        """End the stream if it has expired; otherwise check again when it may have."""
        ttl = self._door.settings.stream_ttl
        left = stream.touched + ttl - time.monotonic()
        if stream.name not in self._streams:
            return
        loop = asyncio.get_running_loop()
        if left > 0 or stream.answering:
            loop.call_later(max(left, 1.0) if stream.answering else left, self._watch, stream)
        else:
            ending = loop.create_task(self._end(stream))
            ending.add_done_callback(lambda done: done.exception())
