"""POST /api/chat and /api/generate: Ollama's routes that generate text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.http.body import read_request
from streamserve.api.http.ignored_fields import IgnoredFields, ignored_of
from streamserve.api.http.limits import charge_of
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.conversation import LARGE_REQUEST, Conversation, prepared
from streamserve.api.openai.field_names import renamed
from streamserve.api.openai.prompts import Encoder
from streamserve.api.openai.repeats import KEY_PARAMETER, with_key_seed
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.slo import header_parameters, with_header_targets
from streamserve.api.openai.thinking import with_thinking
from streamserve.api.routes import Operation, Route, json_response
from streamserve.extras.ollama.answer import AnswerPart, OllamaGeneration, Reply
from streamserve.extras.ollama.chat_input import as_chat, as_generation, checked_keep_alive
from streamserve.extras.ollama.durations import RequestStopwatch
from streamserve.extras.ollama.errors import OllamaError
from streamserve.extras.ollama.json_lines import LINES
from streamserve.extras.ollama.models import served_as
from streamserve.extras.ollama.other_fields import NAMES, OTHER_IN_GENERATE, OTHER_IN_OLLAMA_CHATS
from streamserve.extras.ollama.schemas import (
    OllamaChatReply,
    OllamaChatRequest,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)
from streamserve.protocol.errors import RequestError


async def chat(context: AppContext, request: Request) -> Response:
    """Answer a conversation. Raises RequestError if the request cannot be served."""
    stopwatch = RequestStopwatch()
    body = await read_request(request, context, OllamaChatRequest, OTHER_IN_OLLAMA_CHATS)
    form = _RouteForm(as_chat, _chat_reply, NAMES, empty=not body.messages)
    return await _respond(context, request, body, form, stopwatch)


async def generate_text(context: AppContext, request: Request) -> Response:
    """Answer or continue one prompt. Raises RequestError if the request cannot be served."""
    stopwatch = RequestStopwatch()
    body = await read_request(request, context, OllamaGenerateRequest, OTHER_IN_GENERATE)
    names = {**NAMES, "messages": "prompt"}
    form = _RouteForm(as_generation, _generate_reply, names, empty=not body.prompt)
    return await _respond(context, request, body, form, stopwatch)


@dataclass(frozen=True)
class _RouteForm:
    """What differs between the routes: how a request becomes a chat request, how its reply is built, the
    names of fields in errors; and whether the request is empty, so that it only loads the model."""

    convert: Callable[[Any, str, IgnoredFields], ChatRequest]
    reply: Reply
    names: Mapping[str, str]
    empty: bool


async def _respond(
    context: AppContext, request: Request, body: OllamaRequest, form: _RouteForm, stopwatch: RequestStopwatch
) -> Response:
    ignored = ignored_of(request)
    checked_keep_alive(body, form.empty, ignored)
    requested = served_as(context.models, body.model)
    context = await stopwatch.loading(routed(context, request, requested))
    served = served_name(context.llm, requested)
    model = body.model or served
    if form.empty:
        common = {"model": model, "created_at": datetime.now(UTC), "done": True, "done_reason": "load"}
        return json_response(form.reply(AnswerPart(), {**common, **stopwatch.without_text()}))
    try:
        large = charge_of(request).held > LARGE_REQUEST
        asked = await context.side_thread.run_if(large, lambda: form.convert(body, served, ignored))
        asked = with_key_seed(with_header_targets(asked, request.headers), request.headers)
        asked = with_thinking(asked, context.llm.chat_template, ignored, "think", "think")
        conversation = await _conversation(context, request, body, asked)
        conversation = conversation.within_context(context.llm, "num_predict", ignored)
    except RequestError as error:
        raise renamed(error, form.names) from error
    generation = OllamaGeneration(context, asked, conversation, stopwatch, model, form.reply, form.names)
    return await generation.respond(request, served)


async def _conversation(
    context: AppContext, request: Request, body: OllamaRequest, asked: ChatRequest
) -> Conversation:
    """Prepare a conversation. A raw prompt, and every prompt of a model without a chat template, is continued
    as it is; its reasoning is separated only if `think` asks for it."""
    charge, ignored = charge_of(request), ignored_of(request)
    if not isinstance(body, OllamaGenerateRequest) or not (
        body.raw or (context.llm.chat_template is None and not body.system)
    ):
        return await prepared(context, asked, charge, ignored)
    encoder = Encoder(context.llm, context.side_thread, charge)
    (prompt,) = await encoder.encode([body.prompt], True, "prompt")
    conversation = await prepared(context, asked, charge, ignored, prompt)
    return conversation if body.think else replace(conversation, thinking=None)


def _chat_reply(part: AnswerPart, common: dict[str, Any]) -> OllamaChatReply:
    message = OllamaMessage(
        content=part.content, thinking=part.thinking or UNSET, tool_calls=part.calls or UNSET
    )
    return OllamaChatReply(message=message, logprobs=part.logprobs or UNSET, **common)


def _generate_reply(part: AnswerPart, common: dict[str, Any]) -> OllamaGenerateReply:
    return OllamaGenerateReply(
        response=part.content, thinking=part.thinking or UNSET, logprobs=part.logprobs or UNSET, **common
    )


_PARAMETERS = (*header_parameters(), KEY_PARAMETER)

GENERATING_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/api/chat",
        chat,
        Operation(
            "The next message of a conversation, in Ollama's API",
            OllamaChatRequest,
            OllamaChatReply,
            event=OllamaChatReply,
            event_media=LINES,
            others=OTHER_IN_OLLAMA_CHATS,
            error=OllamaError,
            parameters=_PARAMETERS,
            example={
                "messages": [{"role": "user", "content": "Say hello."}],
                "stream": False,
                "options": {"num_predict": 16},
            },
        ),
    ),
    Route(
        "POST",
        "/api/generate",
        generate_text,
        Operation(
            "The answer to one prompt, in Ollama's API",
            OllamaGenerateRequest,
            OllamaGenerateReply,
            event=OllamaGenerateReply,
            event_media=LINES,
            others=OTHER_IN_GENERATE,
            error=OllamaError,
            parameters=_PARAMETERS,
            example={"prompt": "Say hello.", "stream": False, "options": {"num_predict": 16}},
        ),
    ),
)
