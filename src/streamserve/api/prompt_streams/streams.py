"""Prompt streams: prompts that arrive in chunks. Each edit is synced to the engine; finishing one answers it.

create ─▶ open ── edit, edit, … ──▶ finish ─▶ answering ─▶ closed
            └── delete, or no request for stream_ttl seconds ──▶ closed

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
from streamserve.api.generator import EnginePromptStream
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
from streamserve.api.prompt_streams.template import (
    Answer,
    PromptTemplate,
    prompt_template,
    text_after_context,
)
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.text.prompt_chunks import ContextVersion
from streamserve.text.retokenize import EMPTY, THREAD_THRESHOLD, Retokenizer, Tokenized, common_prefix

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
        context: AppContext,
        template: PromptTemplate,
        engine_stream: EnginePromptStream,
        retokenizer: Retokenizer,
        charge: Charge,
        answer_early: bool,
    ) -> None:
        self._size = charge.held
        self._large = self._size > LARGE_REQUEST
        self.name = name
        self.answer_early = answer_early
        self.reading = False
        """Whether a client reads its early answer."""
        self.answering = False
        self.last_used = time.monotonic()
        self.engine_stream = engine_stream
        self._model = model
        self._created = int(time.time())
        self._context = context
        self._template = template
        self._retokenizer = retokenizer
        self._charge = charge
        self._suffix = ""
        self._current = ContextVersion()
        self._tokenized = EMPTY
        self._lock = asyncio.Lock()

    @property
    def wants_events(self) -> bool:
        """Whether the create request asked for a streamed answer."""
        return self._template.wants_events

    @property
    def version(self) -> int:
        """The number of edits so far."""
        return self._current.version

    async def start(self) -> None:
        """Sync the text before the first chunk to the engine."""
        self._suffix = await self._context.side_thread.run_if(
            self._large, lambda: text_after_context(self._template)
        )
        self._tokenized = await self._sync(self._current)

    async def edit(self, body: EditRequest) -> EditReply:
        """Apply an edit."""
        async with self._lock:
            self._check_open(body.version)
            large = len(self._current.chunks) > _MANY_CHUNKS or len(body.operations) > _MANY_CHUNKS
            before = self._current
            context_version, chunk_ids = await self._context.side_thread.run_if(
                large, lambda: before.edited(body.operations)
            )
            self._tokenized = await self._sync(context_version)
            self._context.metrics.stream_chunks.inc(context_version.added - self._current.added)
            self._current = context_version
            return EditReply(id=self.name, version=context_version.version, chunks=chunk_ids)

    async def finish(self, body: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Close the stream to edits; return the answer and the task for its current prompt."""
        async with self._lock:
            self._check_open(body.version)
            answer, task = await self._answer(body)
            params = self._context.llm.complete(task.prompt.ids, task.params)
            if self.answer_early:
                await self.engine_stream.finish()
            self.answering = True
            return answer, replace(task, params=params)

    async def read(self) -> None:
        """Mark the early answer as read by a client; only one client may read it."""
        async with self._lock:
            self._check_open(None)
            if not self.answer_early:
                raise RequestError("the stream was not created with answer_early", status=409)
            if self.reading:
                raise RequestError("another client reads this answer already", status=409)
            self.reading = True

    async def current_answer(self, body: FinishRequest) -> tuple[Answer, GenerationTask, int]:
        """Return the answer and the task for the current early answer, and the prompt's version."""
        async with self._lock:
            return *await self._answer(body), self._current.version

    async def _answer(self, body: FinishRequest) -> tuple[Answer, GenerationTask]:
        prompt = Prompt(self.engine_stream.ids, self._tokenized.text)
        answer, task = await self._template.answer(prompt, body)
        return answer, replace(task, prompt_stream=self.engine_stream)

    def state(self) -> StreamState:
        """Return the state of the stream."""
        self.last_used = time.monotonic()
        chunks = [ChunkState(chunk.id, len(chunk.text)) for chunk in self._current.chunks]
        return StreamState(
            id=self.name,
            created=self._created,
            model=self._model,
            status="answering" if self.answering else "open",
            version=self._current.version,
            chunks=chunks,
            tokens=len(self.engine_stream.ids),
            computed=self.engine_stream.computed,
        )

    def _check_open(self, version: int | None) -> None:
        self.last_used = time.monotonic()
        if self.answering:
            raise RequestError(f"stream {self.name} is finished", status=409)
        if version is not None:
            self._current.check(version)

    async def _sync(self, context_version: ContextVersion) -> Tokenized:
        """Tokenize the prompt with `context_version`, and sync it to the engine."""
        limit, tokenizer = self._context.llm.model.max_model_len, self._context.llm.tokenizer
        self._check_length(sum(len(chunk.text) for chunk in context_version.chunks))
        charged = self._charge.held
        try:
            tokenized, tail = await self._tokenize(context_version)
            before, suffix = tokenizer.added_special_tokens if self._template.add_special_tokens else ([], [])
            ids = before + tokenized.ids + suffix
            if len(ids) > limit:
                raise RequestError(
                    f"the prompt would have {len(ids)} tokens, but the model's context holds {limit}",
                    field="operations",
                )
            await self.engine_stream.edit(ids, tail + len(suffix))
        except BaseException:
            self._charge.set(charged)
            raise
        return tokenized

    def _check_length(self, characters: int) -> None:
        limit = self._context.llm.model.max_model_len
        if characters > limit * self._context.llm.tokenizer.longest_token:
            raise RequestError(
                f"the prompt would have {characters} characters, far more than a context of {limit} holds",
                field="operations",
            )

    async def _tokenize(self, context_version: ContextVersion) -> tuple[Tokenized, int]:
        """Return the prompt's tokens, charged, and how many of the last ones come after the context."""
        chunks = len(context_version.chunks)
        texts = sum(sys.getsizeof(chunk.text) for chunk in context_version.chunks)
        base = self._size + texts + _CHUNK_BYTES * chunks
        self._charge.set(max(self._charge.held, base + 2 * texts))
        large = self._large or texts > THREAD_THRESHOLD or chunks > _MANY_CHUNKS
        tokenized, tail = await self._context.side_thread.run_if(large, lambda: self._encode(context_version))
        self._charge.set(base + sys.getsizeof(tokenized.text) + 2 * TOKEN_BYTES * len(tokenized.ids))
        return tokenized, tail

    def _encode(self, context_version: ContextVersion) -> tuple[Tokenized, int]:
        text = self._template.text(context_version.text)
        self._check_length(len(text))
        tokenized = self._retokenizer.encode(text, self._tokenized)
        if not (self._suffix and text.endswith(self._suffix)):
            return tokenized, 0
        ahead = self._retokenizer.encode(text[: -len(self._suffix)], tokenized)
        return tokenized, len(tokenized.ids) - common_prefix(ahead.ids, tokenized.ids)


class Streams:
    """All open prompt streams of a server."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._retokenizer = Retokenizer(context.llm.tokenizer)
        self._streams: dict[str, PromptStream] = {}
        self._resources: dict[str, ExitStack] = {}

    async def create(self, body: StreamRequest, size: int) -> StreamReply:
        """Create a stream, whose request takes `size` bytes.

        Raises RequestError if too many are open, or naming the field at fault.
        """
        llm = self._context.llm
        model = served_name(llm, body.model)
        name = new_id("stream")
        with ExitStack() as resources:
            resources.enter_context(self._context.drain.request())
            self._reserve_slot(name, resources)
            charge = resources.enter_context(self._context.memory.charge())
            charge.add(size)
            template = prompt_template(self._context, body)
            text = await self._context.side_thread.run_if(size > LARGE_REQUEST, lambda: template.text(""))
            _, task = await template.answer(Prompt([0], text), FinishRequest())  # validates all fields now
            engine_stream = await llm.open(
                task.params,
                request_id=name,
                priority=body.priority,
                cache_salt=body.cache_salt,
                answer_early=body.answer_early,
            )
            stream = PromptStream(
                name,
                model,
                self._context,
                template,
                engine_stream,
                self._retokenizer,
                charge,
                body.answer_early,
            )
            try:
                await stream.start()
            except BaseException:
                await engine_stream.close()
                raise
            self._streams[name] = stream
            self._resources[name] = resources.pop_all()
        self._schedule_expiry(stream)
        return StreamReply(id=name)

    def _reserve_slot(self, name: str, resources: ExitStack) -> None:
        """Count one more stream as open, until `resources` is closed."""
        limit = self._context.settings.max_streams
        if len(self._resources) >= limit:
            raise RequestError(
                f"{limit} prompt streams are open, which is the limit (max_streams)",
                status=429,
                retry_after=_RETRY_AFTER,
            )
        self._resources[name] = resources
        self._context.metrics.streams.inc()
        resources.callback(self._context.metrics.streams.dec)
        resources.callback(self._resources.pop, name, None)

    def names(self) -> set[str]:
        """Return the names of the open streams."""
        return set(self._streams)

    def wants_events(self, name: str, body: FinishRequest) -> bool:
        """Return whether the reply to a finish request is a stream of events."""
        if name in self._streams and self._streams[name].reading:
            return False
        if body.stream is None:
            return name in self._streams and self._streams[name].wants_events
        return body.stream

    def get(self, name: str) -> PromptStream:
        """Return a stream by name. Raises RequestError (404) if there is none."""
        if name not in self._streams:
            reason = "it is finished, deleted or expired"
            raise RequestError(f"there is no stream {name[:64]!r}: {reason}", status=404)
        return self._streams[name]

    async def finish(self, name: str, body: FinishRequest) -> bytes:
        """Finish a stream and return the whole answer; only confirm if a client reads its early answer."""
        stream = self.get(name)
        answer, task = await stream.finish(body)
        if stream.reading:
            return msgspec.json.encode(StreamReply(id=name, version=stream.version))
        try:
            while True:
                try:
                    return await answer.whole([task])
                except PromptChanged:  # by an edit before the stream was finished
                    answer, task, _ = await stream.current_answer(body)
        finally:
            await self._end(stream)

    async def finish_streaming(
        self, name: str, body: FinishRequest
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        """Finish a stream; return the function that sends its answer as events. It must be called."""
        stream = self.get(name)
        answer, task = await stream.finish(body)

        async def produce(emit: Emit) -> None:
            try:
                await self._send(stream, body, answer, task, emit)
            finally:
                await self._end(stream)

        return produce

    async def answer_early(
        self, name: str, body: AnswerRequest
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        """Return the function that sends the early answer as events, until the stream is finished.

        It must be called. Raises RequestError (409) if the stream has no early answer, or if a client reads
        it already.
        """
        stream = self.get(name)
        await stream.read()
        options = FinishRequest(stream=True, stream_options=body.stream_options)

        async def produce(emit: Emit) -> None:
            try:
                answer, task, _ = await stream.current_answer(options)
                await self._send(stream, options, answer, task, emit)
            finally:
                await self._end(stream)

        return produce

    async def _send(
        self, stream: PromptStream, body: FinishRequest, answer: Answer, task: GenerationTask, emit: Emit
    ) -> None:
        """Send the events of an answer; when it is withdrawn, send an event for that, and start again."""
        sent = 0

        async def count(event: msgspec.Struct) -> None:
            nonlocal sent
            sent += 1
            await emit(event)

        while True:
            try:
                return await answer.stream([task], count)
            except PromptChanged:
                answer, task, version = await stream.current_answer(body)
                if sent:
                    await emit(WithdrawnReply(id=stream.name, version=version))
                sent = 0

    async def delete(self, name: str) -> None:
        """Delete a stream; if it is being answered, its client gets an error. Raises RequestError (404)."""
        await self._end(self.get(name))

    async def _end(self, stream: PromptStream) -> None:
        if self._streams.pop(stream.name, None) is not None:
            self._resources[stream.name].close()
            await stream.engine_stream.close()

    def _schedule_expiry(self, stream: PromptStream) -> None:
        """End the stream if it has expired; otherwise check again when it may have."""
        ttl = self._context.settings.stream_ttl
        left = stream.last_used + ttl - time.monotonic()
        if stream.name not in self._streams:
            return
        loop = asyncio.get_running_loop()
        if left > 0 or stream.answering:
            loop.call_later(max(left, 1.0) if stream.answering else left, self._schedule_expiry, stream)
        else:
            ending = loop.create_task(self._end(stream))
            ending.add_done_callback(lambda done: done.exception())
