"""One prompt stream: a prompt that arrives in chunks. Edits are synced to the engine; finishing answers it.

create ─▶ open ── edit, edit, … ──▶ finish ─▶ answering ─▶ closed
            └── delete, or no request for stream_ttl seconds ──▶ closed

An early answer may be read while the stream is open: each change makes the tokens read so far void.
"""

import asyncio
import sys
import time
from dataclasses import replace

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask
from streamserve.api.generator import EnginePromptStream
from streamserve.api.http.memory import TOKEN_BYTES, Charge
from streamserve.api.openai.conversation import LARGE_REQUEST
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.prompt_streams.schemas import (
    ChunkState,
    EditReply,
    EditRequest,
    FinishRequest,
    StreamState,
)
from streamserve.api.prompt_streams.template import (
    Answer,
    PromptTemplate,
    text_after_context,
)
from streamserve.protocol.errors import RequestError
from streamserve.text.prompt_chunks import ContextVersion
from streamserve.text.retokenize import EMPTY, THREAD_THRESHOLD, Retokenizer, Tokenized, common_prefix

_MANY_CHUNKS = 256
"""With more chunks, or more operations on them, an edit takes a millisecond or more."""

_CHUNK_BYTES = 200
"""Memory of a chunk in bytes, besides its text."""


class ServerPromptStream:
    """One stream. If a method raises RequestError, nothing has changed.

    `owner` is the id of the caller that created it. `charge` covers the memory of its request and of the
    prompt: its text, in chunks and as a whole, and its tokens.
    """

    def __init__(
        self,
        name: str,
        owner: str,
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
        self.owner = owner
        self.answer_early = answer_early
        self.reading = False
        """Whether a client reads the early answer."""
        self.answering = False
        self.last_used = time.monotonic()
        self.engine_stream = engine_stream
        self._model = model
        self._created = int(time.time())
        self.context = context
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
        self._suffix = await self.context.side_thread.render(
            self._large, lambda: text_after_context(self._template)
        )
        self._tokenized = await self._sync(self._current)

    async def edit(self, body: EditRequest) -> EditReply:
        async with self._lock:
            self._check_open(body.version)
            large = len(self._current.chunks) > _MANY_CHUNKS or len(body.operations) > _MANY_CHUNKS
            before = self._current
            context_version, chunk_ids = await self.context.side_thread.run_if(
                large, lambda: before.edited(body.operations)
            )
            self._tokenized = await self._sync(context_version)
            self.context.metrics.stream_chunks.inc(context_version.added - self._current.added)
            self._current = context_version
            return EditReply(id=self.name, version=context_version.version, chunks=chunk_ids)

    async def finish(self, body: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Close the stream to edits; return the answer, and the task for the current prompt."""
        async with self._lock:
            self._check_open(body.version)
            answer, task = await self._answer(body)
            params = self.context.llm.complete(task.prompt.ids, task.params)
            if self.answer_early:
                await self.engine_stream.finish()
            self.answering = True
            return answer, replace(task, params=params)

    async def read(self) -> None:
        """Mark the early answer as being read by a client.

        Raises RequestError (409) if the stream has no early answer, or if a client reads it already.
        """
        async with self._lock:
            self._check_open(None)
            if not self.answer_early:
                raise RequestError("the stream was not created with answer_early", status=409)
            if self.reading:
                raise RequestError("another client is already reading this answer", status=409)
            self.reading = True

    async def current_answer(self, body: FinishRequest) -> tuple[Answer, GenerationTask, int]:
        """Return the current early answer, its task, and the prompt's version."""
        async with self._lock:
            return *await self._answer(body), self._current.version

    async def _answer(self, body: FinishRequest) -> tuple[Answer, GenerationTask]:
        prompt = EncodedPrompt(self.engine_stream.ids, self._tokenized.text)
        answer, task = await self._template.answer(prompt, body)
        return answer, replace(task, prompt_stream=self.engine_stream)

    def state(self) -> StreamState:
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
        limit, tokenizer = self.context.llm.model.max_model_len, self.context.llm.tokenizer
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
        limit = self.context.llm.model.max_model_len
        if characters > limit * self.context.llm.tokenizer.longest_token:
            raise RequestError(
                f"the prompt would have {characters} characters, far more than a context of {limit} holds",
                field="operations",
            )

    async def _tokenize(self, context_version: ContextVersion) -> tuple[Tokenized, int]:
        """Return the prompt's tokens, whose memory is charged, and the number of tokens after the context."""
        chunks = len(context_version.chunks)
        texts = sum(sys.getsizeof(chunk.text) for chunk in context_version.chunks)
        base = self._size + texts + _CHUNK_BYTES * chunks
        self._charge.set(max(self._charge.held, base + 2 * texts))
        large = self._large or texts > THREAD_THRESHOLD or chunks > _MANY_CHUNKS
        tokenized, tail = await self.context.side_thread.render(large, lambda: self._encode(context_version))
        self._charge.set(base + sys.getsizeof(tokenized.text) + 2 * TOKEN_BYTES * len(tokenized.ids))
        return tokenized, tail

    def _encode(self, context_version: ContextVersion) -> tuple[Tokenized, int]:
        prompt = self._template.text(context_version.text)
        self._check_length(len(prompt.text))
        tokenized = self._retokenizer.encode(prompt, self._tokenized)
        if not (self._suffix and prompt.text.endswith(self._suffix)):
            return tokenized, 0
        start = len(prompt.text) - len(self._suffix)
        ahead = self._retokenizer.encode(prompt.between(0, start), tokenized)
        return tokenized, len(tokenized.ids) - common_prefix(ahead.ids, tokenized.ids)
