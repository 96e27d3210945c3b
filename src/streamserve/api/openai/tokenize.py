"""POST /tokenize and /detokenize: convert a prompt to token ids and back without generating, as in vLLM."""

from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.http.body import read_request
from streamserve.api.http.ignored_fields import LENIENT, IgnoredFields, OtherFields, ignored_of
from streamserve.api.http.limits import charge_of
from streamserve.api.http.memory import Charge
from streamserve.api.leases import routed
from streamserve.api.openai.conversation import LARGE_REQUEST, chat_prompt, chat_tools
from streamserve.api.openai.idle_fields import without_unknown_keys
from streamserve.api.openai.prompts import Encoder
from streamserve.api.openai.schemas import ChatRequest, Model, about
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.routes import JSON, Operation, Route, json_response
from streamserve.protocol.errors import RequestError

_THREAD_ABOVE = 4096
"""More tokens take over a millisecond to decode: this is done in the side thread."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize. Either `prompt`, a text, or `messages`, a conversation that the chat template
    renders."""

    model: Model = None
    prompt: Annotated[str | None, about("the text", examples=["Once upon a time"])] = None
    messages: Annotated[
        list[dict[str, Any]] | None, about("the conversation: objects with role and content", minItems=1)
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about("let the tokenizer add its first token; by default true for prompt, and false for messages"),
    ] = None
    return_token_strs: Annotated[bool, about("return the tokens as written in the vocabulary, too")] = False
    add_generation_prompt: Annotated[bool, about("with messages: open the assistant's message")] = True
    continue_final_message: Annotated[bool, about("with messages: leave the last message open")] = False
    chat_template: Annotated[
        str | None,
        about("with messages: a chat template in Jinja in place of the model's own, if the server allows it"),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("with messages: further variables for the chat template")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, about("with messages: functions that the model may call")
    ] = None


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids, their number, and the model's context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: Model = None
    tokens: Annotated[list[int], about("token ids", examples=[[1, 2, 3]])]


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the tokens, including special tokens."""

    prompt: str


_OTHER = OtherFields(without_effect={"mm_processor_kwargs": ({},)})
_OF_CONVERSATIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


async def tokenize(context: AppContext, request: Request) -> Response:
    """Return the token ids of a prompt. Raises RequestError naming the field at fault."""
    body = await read_request(request, context, TokenizeRequest, _OTHER)
    context = await routed(context, request, body.model)
    if body.messages is not None:
        messages = without_unknown_keys(body.messages, ignored_of(request))
        body = msgspec.structs.replace(body, messages=messages)
    prompt = await _prompt(context, body, charge_of(request), ignored_of(request))
    large = len(prompt.ids) > _THREAD_ABOVE
    reply = await context.side_thread.run_if(large, lambda: _tokens_reply(context, body, prompt))
    return Response(reply, media_type=JSON)


async def detokenize(context: AppContext, request: Request) -> Response:
    """Return the text of token ids. Raises RequestError naming the field at fault."""
    body = await read_request(request, context, DetokenizeRequest, LENIENT)
    context = await routed(context, request, body.model)
    reply = DetokenizeReply(prompt=await _text(context, body.tokens))
    return json_response(reply)


TOKENIZE_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/tokenize",
        tokenize,
        Operation(
            "Token ids of a text or a conversation",
            TokenizeRequest,
            TokenizeReply,
            others=_OTHER,
            example={"prompt": "Once upon a time", "return_token_strs": True},
        ),
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        Operation(
            "The text of token ids",
            DetokenizeRequest,
            DetokenizeReply,
            others=LENIENT,
            example={"tokens": [5, 6, 7]},
        ),
    ),
)


async def _prompt(
    context: AppContext, body: TokenizeRequest, charge: Charge, ignored: IgnoredFields
) -> EncodedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", field="prompt")
    if body.messages is None:
        for field in msgspec.structs.fields(TokenizeRequest):
            if field.name in _OF_CONVERSATIONS and getattr(body, field.name) != field.default:
                raise RequestError(f"{field.name} needs messages", field=field.name)
        text = body.prompt or ""
        encoder = Encoder(context.llm, context.side_thread, charge)
        return (await encoder.encode([text], body.add_special_tokens is not False, "prompt"))[0]
    chat = ChatRequest(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
        tools=body.tools or [],
    )
    tools = await context.side_thread.run_if(charge.held > LARGE_REQUEST, lambda: chat_tools(context, chat))
    return await chat_prompt(context, chat, None, charge, tools, ignored)


def _tokens_reply(context: AppContext, body: TokenizeRequest, prompt: EncodedPrompt) -> bytes:
    tokenizer = context.llm.tokenizer
    reply = TokenizeReply(
        count=len(prompt.ids),
        max_model_len=context.llm.model.max_model_len,
        tokens=prompt.ids,
        token_strs=[tokenizer.piece(token) for token in prompt.ids] if body.return_token_strs else None,
    )
    return msgspec.json.encode(reply)


async def _text(context: AppContext, tokens: list[int]) -> str:
    size = context.llm.model.vocab_size
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise RequestError(f"tokens has {wrong}, but the vocabulary has {size} tokens", field="tokens")
    decode = partial(context.llm.tokenizer.decode, tokens, skip_special_tokens=False)
    return await context.side_thread.run_if(len(tokens) > _THREAD_ABOVE, decode)
