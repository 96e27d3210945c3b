"""The open prompt streams of a server: they are created, found by name, answered, and ended when finished or
expired."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import msgspec

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, new_id
from streamserve.api.http.memory import Charge
from streamserve.api.http.sse import Emit
from streamserve.api.leases import lease_of
from streamserve.api.model_table import adapter_named, served_name
from streamserve.api.openai.conversation import LARGE_REQUEST
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.prompt_streams.schemas import (
    AnswerRequest,
    FinishRequest,
    StreamReply,
    StreamRequest,
    WithdrawnReply,
)
from streamserve.api.prompt_streams.stream import ServerPromptStream
from streamserve.api.prompt_streams.template import Answer, prompt_template
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.protocol.request_options import RequestOptions
from streamserve.text.retokenize import Retokenizer

_RETRY_AFTER = 5.0
_IN_USE_SECONDS = 5.0
"""A stream is in use for this many seconds after its latest request, and while it is answered. A server that
drains waits for streams in use, but not for idle ones."""


class PromptStreams:
    """All open prompt streams of a server. Each belongs to the caller that created it (`owner`) and does not
    exist for others."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._retokenizers = {context.llm.served_names[0]: Retokenizer(context.llm.tokenizer)}
        self._streams: dict[str, ServerPromptStream] = {}
        self._resources: dict[str, ExitStack] = {}
        self._in_use: dict[str, ExitStack] = {}

    async def create(self, body: StreamRequest, owner: str, size: int) -> StreamReply:
        """Create a stream of `owner`. Its request takes `size` bytes.

        Raises RequestError if too many streams are open or a field is invalid.
        """
        name = new_id("stream")
        with ExitStack() as resources:
            lease = await lease_of(self._context, body.model)
            resources.callback(lease.release)
            context, model = lease.context, served_name(lease.context.llm, body.model)
            context.drain.check_accepting()
            self._reserve_slot(name, context, resources)
            charge = resources.enter_context(self._context.memory.charge())
            charge.add(size)
            stream = await self._open(name, owner, model, context, body, charge)
            try:
                await stream.start()
            except BaseException:
                await stream.engine_stream.close()
                raise
            self._streams[name] = stream
            resources.callback(self._release, name)
            self._resources[name] = resources.pop_all()
        self._use(stream)
        self._schedule_expiry(stream)
        return StreamReply(id=name)

    async def _open(
        self, name: str, owner: str, model: str, context: AppContext, body: StreamRequest, charge: Charge
    ) -> ServerPromptStream:
        """Open a stream in the engine. Raises RequestError naming the field at fault."""
        template = prompt_template(context, body)
        text = await context.side_thread.render(charge.held > LARGE_REQUEST, lambda: template.text(""))
        # Validates all fields before the stream is open.
        _, task = await template.answer(EncodedPrompt([0], text.text), FinishRequest())
        engine_stream = await context.llm.open(
            task.params,
            request_id=name,
            options=RequestOptions(
                body.priority,
                context.cache_salt(owner, body.cache_salt),
                adapter_named(context.llm, model),
            ),
            answer_early=body.answer_early,
            expected_tokens=body.expected_tokens,
        )
        return ServerPromptStream(
            name,
            owner,
            model,
            context,
            template,
            engine_stream,
            self._retokenizer(context),
            charge,
            body.answer_early,
        )

    def _retokenizer(self, context: AppContext) -> Retokenizer:
        """Return the retokenizer of a model."""
        name = context.llm.served_names[0]
        if name not in self._retokenizers:
            self._retokenizers[name] = Retokenizer(context.llm.tokenizer)
        return self._retokenizers[name]

    def _reserve_slot(self, name: str, context: AppContext, resources: ExitStack) -> None:
        """Count one more stream as open, until `resources` is closed."""
        limit = self._context.settings.max_streams
        if len(self._resources) >= limit:
            raise RequestError(
                f"{limit} prompt streams are open, which is the limit (max_streams)",
                status=429,
                retry_after=_RETRY_AFTER,
            )
        self._resources[name] = resources
        context.metrics.streams.inc()
        resources.callback(context.metrics.streams.dec)
        resources.callback(self._resources.pop, name, None)

    def names(self) -> set[str]:
        return set(self._streams)

    def wants_events(self, name: str, owner: str, body: FinishRequest) -> bool:
        """Return whether the reply to a finish request of `owner` is a stream of events."""
        stream = self._find(name, owner)
        if stream is not None and stream.reading:
            return False
        if body.stream is None:
            return stream is not None and stream.wants_events
        return body.stream

    def get(self, name: str, owner: str) -> ServerPromptStream:
        """Return a stream of `owner` by name. Raises RequestError (404) if there is none."""
        stream = self._find(name, owner)
        if stream is None:
            reason = "it is finished, deleted or expired"
            raise RequestError(f"there is no stream {name[:64]!r}: {reason}", status=404)
        self._use(stream)
        return stream

    def _find(self, name: str, owner: str) -> ServerPromptStream | None:
        stream = self._streams.get(name)
        return stream if stream is not None and stream.owner == owner else None

    async def finish(self, name: str, owner: str, body: FinishRequest) -> bytes:
        """Finish a stream and return the complete answer. If a client reads the early answer, only
        confirm."""
        stream = self.get(name, owner)
        answer, task = await stream.finish(body)
        if stream.reading:
            return msgspec.json.encode(StreamReply(id=name, version=stream.version))
        try:
            while True:
                try:
                    return await answer.whole([task])
                except PromptChanged:  # an edit came before the stream was finished
                    answer, task, _ = await stream.current_answer(body)
        finally:
            await self._end(stream)

    async def finish_streaming(
        self, name: str, owner: str, body: FinishRequest
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        """Finish a stream; return the function that sends its answer as events. The function must be called:
        it ends the stream."""
        stream = self.get(name, owner)
        answer, task = await stream.finish(body)

        async def produce(emit: Emit) -> None:
            try:
                await self._send(stream, body, answer, task, emit)
            finally:
                await self._end(stream)

        return produce

    async def answer_early(
        self, name: str, owner: str, body: AnswerRequest
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        """Return the function that sends the early answer as events until the stream is finished.

        The function must be called. Raises RequestError (409) if the stream has no early answer, or if a
        client reads it already.
        """
        stream = self.get(name, owner)
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
        self,
        stream: ServerPromptStream,
        body: FinishRequest,
        answer: Answer,
        task: GenerationTask,
        emit: Emit,
    ) -> None:
        """Send the events of an answer. If the answer becomes void, send an event that says so, and start
        again."""
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

    async def delete(self, name: str, owner: str) -> None:
        """Delete a stream. If it is being answered, its client gets an error. Raises RequestError (404) if
        there is no such stream."""
        await self._end(self.get(name, owner))

    async def _end(self, stream: ServerPromptStream) -> None:
        if self._streams.pop(stream.name, None) is not None:
            with self._resources[stream.name]:  # the model stays loaded until the stream is closed
                await stream.engine_stream.close()

    def _use(self, stream: ServerPromptStream) -> None:
        """Count a stream as an open request until it is idle."""
        stream.last_used = time.monotonic()
        if stream.name not in self._in_use:
            self._in_use[stream.name] = ExitStack()
            self._in_use[stream.name].enter_context(stream.context.drain.request(accepted=True))
            self._release_if_idle(stream)

    def _release_if_idle(self, stream: ServerPromptStream) -> None:
        """Count a stream no longer if it is idle; otherwise schedule the next check."""
        left = stream.last_used + _IN_USE_SECONDS - time.monotonic()
        if left <= 0 and not stream.answering:
            self._release(stream.name)
        elif stream.name in self._streams:
            asyncio.get_running_loop().call_later(max(left, 1.0), self._release_if_idle, stream)

    def _release(self, name: str) -> None:
        if use := self._in_use.pop(name, None):
            use.close()

    def _schedule_expiry(self, stream: ServerPromptStream) -> None:
        """End the stream if it has expired; otherwise schedule the next check."""
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
