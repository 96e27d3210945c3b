"""POST /v1/completions: OpenAI's legacy API, which continues a text. It also scores texts."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, new_id
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.ignored_fields import IgnoredFields, ignored_of
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import Emit, EventStream
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.context_length import within_context
from streamserve.api.openai.idle_fields import without_idle_fields
from streamserve.api.openai.logprobs import completion_logprobs, echo_logprobs, joined, prompt_logprobs
from streamserve.api.openai.options import options_of
from streamserve.api.openai.other_fields import OTHER_IN_COMPLETIONS
from streamserve.api.openai.outputs import GenerationOutput, Piece, collect, head_of
from streamserve.api.openai.prompts import Encoder, completion_prompts, truncation_limit
from streamserve.api.openai.repeats import KEY_PARAMETER, with_key_seed
from streamserve.api.openai.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    UsageReply,
    usage_reply,
)
from streamserve.api.openai.reply_size import TOKEN_CHARACTERS, check_repeated
from streamserve.api.openai.sampling import completion_sampling
from streamserve.api.openai.schemas import CompletionRequest
from streamserve.api.openai.slo import header_parameters, with_header_targets
from streamserve.api.openai.stream_events import StreamWriter
from streamserve.api.openai.structured import requested_grammar, wants_grammar
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.routes import JSON, Operation, Route
from streamserve.protocol.messages import PromptLogprob
from streamserve.protocol.request_options import NO_OPTIONS


async def completions(context: AppContext, request: Request) -> Response:
    """Continue or score the prompts of a request. Raises RequestError if it cannot be served."""
    body = await read_request(request, context, CompletionRequest, OTHER_IN_COMPLETIONS)
    body = without_idle_fields(body, ignored_of(request))
    body = with_header_targets(body, request.headers)
    body = with_key_seed(body, request.headers)
    context = await routed(context, request, body.model)
    return await Completion(context, body).respond(request)


COMPLETION_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        Operation(
            "Text to continue, or to score",
            CompletionRequest,
            CompletionReply,
            event=CompletionReply,
            others=OTHER_IN_COMPLETIONS,
            parameters=[*header_parameters(), KEY_PARAMETER],
            example={"prompt": "Once upon a time", "max_tokens": 16},
        ),
    ),
)


_LARGE_PROMPT = 2048
"""Prompts with more tokens take over a millisecond to decode."""


class Completion:
    """One completion request."""

    def __init__(self, context: AppContext, body: CompletionRequest) -> None:
        self._context = context
        self._body = body
        self._tokenizer = context.llm.tokenizer
        self._head = head_of(new_id("cmpl"), context.llm, served_name(context.llm, body.model))
        defaults = context.settings.default_sampling
        self._params = completion_sampling(body, defaults, context.llm.model.vocab_size)
        self._echoes: list[str] = []
        self._options = NO_OPTIONS

    async def respond(self, request: Request) -> Response:
        """Return the response, whole or as a stream of events.

        Raises RequestError if a prompt cannot be served, or if generation fails.
        """
        llm, body = self._context.llm, self._body
        self._options = options_of(self._context, request, self._body, self._head.model)
        await self.check(ignored_of(request))
        truncate_to = truncation_limit(llm, body.truncate_prompt_tokens, self._params.max_tokens)
        encoder = Encoder(llm, self._context.side_thread, charge_of(request))
        prompts = await completion_prompts(
            encoder, body.prompt, body.add_special_tokens, self._context.settings.max_requests, truncate_to
        )
        limit_name = None if body.max_tokens is None else "max_tokens"
        tasks = [
            replace(
                task,
                params=within_context(
                    llm, task.params, len(task.prompt.ids), "prompt", limit_name, ignored_of(request)
                ),
            )
            for task in await self.tasks(prompts)
        ]
        if body.stream:
            return EventStream(partial(self.stream, tasks))
        reply = await while_connected(request.receive, self.whole(tasks))
        return Response(reply, media_type=JSON)

    async def check(self, ignored: IgnoredFields) -> None:
        """Convert the requested output format to a grammar. Parts of it without effect are added to
        `ignored`.

        Raises RequestError if outputs cannot be constrained by it.
        """
        body = self._body
        requested = await self._context.grammar_thread.run_if(
            wants_grammar(body), lambda: requested_grammar(body, ignored)
        )
        if requested is not None:
            await self._context.llm.check_grammar(requested.grammar, requested.field)
            self._params = msgspec.structs.replace(self._params, grammar=requested.grammar)

    async def tasks(self, prompts: list[EncodedPrompt]) -> list[GenerationTask]:
        """Build the tasks for the request's prompts; decode the prompts if the reply echoes them."""
        skip, side_thread = self._params.skip_special_tokens, self._context.side_thread
        for prompt in prompts:
            echo = partial(prompt.echo, self._tokenizer, skip)
            self._echoes.append(
                await side_thread.run_if(len(prompt.ids) > _LARGE_PROMPT, echo) if self._body.echo else ""
            )
        return [self._task(number, prompt) for number, prompt in enumerate(prompts)]

    def _task(self, number: int, prompt: EncodedPrompt) -> GenerationTask:
        body, params = self._body, self._params
        remaining = self._context.llm.model.max_model_len - len(prompt.ids)
        if body.max_tokens is None and params.max_tokens is not None and remaining > params.min_tokens:
            params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, remaining))
        name = f"{self._head.id}-{number}"
        return GenerationTask(number, name, prompt, params, self._options)

    def _repeated(self, tasks: list[GenerationTask]) -> int:
        """Return the number of characters of prompts that the reply repeats. Raises RequestError if they are
        too many."""
        n = self._params.n
        echoed = n * sum(map(len, self._echoes))
        check_repeated(echoed, "echo")
        ids = n * sum(len(task.prompt.ids) for task in tasks) if self._body.return_token_ids else 0
        check_repeated(echoed + TOKEN_CHARACTERS * ids, "return_token_ids")
        return echoed + TOKEN_CHARACTERS * ids

    async def whole(self, tasks: list[GenerationTask]) -> bytes:
        """Run the tasks to their end; return the reply as JSON. Raises RequestError if it is too large."""
        return await collect(self._context, tasks, self._whole, self._repeated(tasks))

    async def stream(self, tasks: list[GenerationTask], emit: Emit) -> None:
        """Run the tasks, sending an event for each delta."""
        await StreamWriter(self._body, self._event, self._choices, emit).run(self._context, tasks)

    def _event(
        self,
        choices: list[CompletionChoice],
        usage: UsageReply | UnsetType | None,
        begun: GenerationTask | None,
    ) -> CompletionReply:
        return self._reply(choices, usage)

    def _whole(self, outputs: list[GenerationOutput]) -> CompletionReply:
        choices = [
            self._choice(output.task, number, piece, True, output.prompt_logprobs)
            for output in outputs
            for number, piece in enumerate(output.choices)
        ]
        return self._reply(choices, usage_reply([output.usage for output in outputs]))

    def _reply(
        self, choices: list[CompletionChoice], usage: UsageReply | UnsetType | None
    ) -> CompletionReply:
        head = self._head
        return CompletionReply(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _choices(
        self, task: GenerationTask, number: int, piece: Piece, first: bool, entries: Iterable[PromptLogprob]
    ) -> list[CompletionChoice]:
        return [self._choice(task, number, piece, first, entries)]

    def _choice(
        self, task: GenerationTask, number: int, piece: Piece, first: bool, entries: Iterable[PromptLogprob]
    ) -> CompletionChoice:
        """Build a choice of `task`, complete or a delta. The `first` delta carries the fields of the
        prompt."""
        ids = self._body.return_token_ids
        count = self._body.prompt_logprobs
        return CompletionChoice(
            index=task.index(number),
            text=(self._echoes[task.number] if first else "") + piece.text,
            logprobs=self._logprobs(task, piece, first, entries),
            finish_reason=piece.finish,
            stop_reason=piece.stop,
            prompt_logprobs=None if count is None else prompt_logprobs(self._tokenizer, entries, count),
            token_ids=piece.tokens if ids else None,
            prompt_token_ids=task.prompt.ids if ids and first else None,
        )

    def _logprobs(
        self, task: GenerationTask, piece: Piece, first: bool, entries: Iterable[PromptLogprob]
    ) -> CompletionLogprobs | None:
        count = self._body.logprobs
        if count is None:
            return None
        as_ids = self._body.return_tokens_as_token_ids
        table = completion_logprobs(piece.logprobs, len(self._echoes[task.number]), as_ids, packed=True)
        if not (first and self._body.echo):
            return table
        skip = self._params.skip_special_tokens
        echoed = echo_logprobs(self._tokenizer, task.prompt, entries, skip, count, as_ids, packed=True)
        return joined(echoed, table)
