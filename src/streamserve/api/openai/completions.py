"""POST /v1/completions: OpenAI's legacy API to continue a text; also scores texts."""

from collections.abc import Iterable
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from streamserve.api.generation import (
    AppContext,
    GenerationOutput,
    GenerationTask,
    Piece,
    collect,
    head_of,
    new_id,
)
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import Emit, EventStream
from streamserve.api.openai.logprobs import completion_logprobs, echo_logprobs, joined, prompt_logprobs
from streamserve.api.openai.prompts import Encoder, Prompt, completion_prompts, kept_tokens
from streamserve.api.openai.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    UsageReply,
    usage_reply,
)
from streamserve.api.openai.sampling import completion_sampling
from streamserve.api.openai.schemas import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest
from streamserve.api.openai.slo import header_parameters, with_header_targets
from streamserve.api.openai.stream_events import StreamWriter
from streamserve.api.openai.structured import wanted_grammar, wants_form
from streamserve.api.ops.models import served_name
from streamserve.api.ops.openapi import described
from streamserve.protocol.messages import PromptLogprob


def completion_routes(door: AppContext) -> APIRouter:
    """Build the route."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        openapi_extra=described(
            "Text to continue, or to score",
            CompletionRequest,
            CompletionReply,
            event=CompletionReply,
            unsupported=UNSUPPORTED_IN_COMPLETIONS,
            parameters=header_parameters(),
            example={"prompt": "Once upon a time", "max_tokens": 16},
        ),
    )
    async def completions(request: Request) -> Response:
        wanted = await read_request(request, door, CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
        wanted = with_header_targets(wanted, request.headers)
        return await Completion(door, wanted).respond(request)

    return router


class Completion:
    """One completion request."""

    def __init__(self, door: AppContext, wanted: CompletionRequest) -> None:
        self._door = door
        self._wanted = wanted
        self._tokenizer = door.llm.tokenizer
        self._head = head_of(new_id("cmpl"), door.llm, served_name(door.llm, wanted.model))
        defaults = door.settings.default_sampling
        self._params = completion_sampling(wanted, defaults, door.llm.model.vocab_size)
        self._echoes: list[str] = []

    async def respond(self, request: Request) -> Response:
        llm, wanted = self._door.llm, self._wanted
        await self.check()
        keep = kept_tokens(llm, wanted.truncate_prompt_tokens, self._params.max_tokens)
        encoder = Encoder(llm, self._door.side, charge_of(request))
        prompts = await completion_prompts(
            encoder, wanted.prompt, wanted.add_special_tokens, self._door.settings.max_prompts, keep
        )
        jobs = [self.job(number, prompt) for number, prompt in enumerate(prompts)]
        if wanted.stream:
            return EventStream(partial(self.stream, jobs))
        body = await while_connected(request.receive, self.whole(jobs))
        return Response(body, media_type="application/json")

    async def check(self) -> None:
        """Convert the requested output format to a grammar.

        Raises RequestError if outputs cannot be constrained by it.
        """
        wanted = self._wanted
        form = await self._door.forms.run_if(wants_form(wanted), lambda: wanted_grammar(wanted))
        if form is not None:
            await self._door.llm.check_grammar(form.grammar, form.field)
            self._params = msgspec.structs.replace(self._params, grammar=form.grammar)

    def job(self, number: int, prompt: Prompt) -> GenerationTask:
        """Build the job for the request's `number`-th prompt; call in order."""
        wanted, params = self._wanted, self._params
        room = self._door.llm.model.max_model_len - len(prompt.ids)
        if wanted.max_tokens is None and params.max_tokens is not None and room > 0:
            params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
        self._echoes.append(self._echo(prompt))
        name = f"{self._head.id}-{number}"
        return GenerationTask(number, name, prompt, params, wanted.priority, wanted.cache_salt)

    def _echo(self, prompt: Prompt) -> str:
        if not self._wanted.echo:
            return ""
        return prompt.echo(self._tokenizer, self._params.skip_special_tokens)

    async def whole(self, jobs: list[GenerationTask]) -> bytes:
        """Run the jobs to their end; return the reply as JSON."""
        return await collect(self._door, jobs, self._whole)

    async def stream(self, jobs: list[GenerationTask], emit: Emit) -> None:
        """Run the jobs, sending an event for each delta."""
        await StreamWriter(self._wanted, self._reply, self._choice, emit).run(self._door, jobs)

    def _whole(self, outputs: list[GenerationOutput]) -> CompletionReply:
        choices = [
            self._choice(output.job, number, piece, True, output.prompt_logprobs)
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

    def _choice(
        self, job: GenerationTask, number: int, piece: Piece, first: bool, entries: Iterable[PromptLogprob]
    ) -> CompletionChoice:
        """Build a choice of `job`, whole or a delta. The `first` delta carries the fields of the prompt."""
        ids = self._wanted.return_token_ids
        count = self._wanted.prompt_logprobs
        return CompletionChoice(
            index=job.index(number),
            text=(self._echoes[job.number] if first else "") + piece.text,
            logprobs=self._logprobs(job, piece, first, entries),
            finish_reason=piece.finish,
            stop_reason=piece.stop,
            prompt_logprobs=UNSET if count is None else prompt_logprobs(self._tokenizer, entries, count),
            token_ids=piece.tokens if ids else UNSET,
            prompt_token_ids=job.prompt.ids if ids and first else UNSET,
        )

    def _logprobs(
        self, job: GenerationTask, piece: Piece, first: bool, entries: Iterable[PromptLogprob]
    ) -> CompletionLogprobs | None:
        count = self._wanted.logprobs
        if count is None:
            return None
        as_ids = self._wanted.return_tokens_as_token_ids
        table = completion_logprobs(piece.logprobs, len(self._echoes[job.number]), as_ids, packed=True)
        if not (first and self._wanted.echo):
            return table
        skip = self._params.skip_special_tokens
        echoed = echo_logprobs(self._tokenizer, job.prompt, entries, skip, count, as_ids, packed=True)
        return joined(echoed, table)
