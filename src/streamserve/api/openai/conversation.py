"""Prepares a chat request: its prompt, its sampling parameters, and the parsers of its replies."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from streamserve.api.context import AppContext
from streamserve.api.generator import Generator
from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.http.memory import TOKEN_BYTES, Charge
from streamserve.api.openai.context_length import within_context
from streamserve.api.openai.messages import checked_messages
from streamserve.api.openai.prompts import Encoder, truncation_limit
from streamserve.api.openai.sampling import chat_sampling
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.structured import RequestedGrammar, requested_grammar, wants_grammar
from streamserve.api.openai.tools import Tools, requested_tools
from streamserve.api.prompt import EncodedPrompt
from streamserve.protocol.errors import CheckpointError, RequestError, context_overflow
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.chat import Renderer, given_template, require
from streamserve.text.harmony import HarmonyParser
from streamserve.text.message import MessageParser, OutputReader
from streamserve.text.reasoning import ReasoningFormat, ReasoningParser, find_reasoning_format
from streamserve.text.rendering import RenderedConversation, render_conversation
from streamserve.text.structured import json_grammar
from streamserve.text.tokenizer import Tokenizer
from streamserve.text.tools.formats import FORMATS

LARGE_REQUEST = 256 << 10
"""Size in bytes of a parsed request above which templates, tools and formats are processed in the side
thread."""


@dataclass(frozen=True)
class Conversation:
    """A prepared chat request. `thinking` is the model's reasoning format, if it has one."""

    prompt: EncodedPrompt
    params: SamplingParams
    tools: Tools | None
    thinking: ReasoningFormat | None

    @property
    def plain(self) -> bool:
        """Whether the output is content only, without reasoning or tool calls."""
        return self.thinking is None and self.tools is None

    @property
    def channels(self) -> bool:
        """Whether replies are in the harmony format."""
        return (self.thinking is not None and self.thinking.channels) or (
            self.tools is not None and self.tools.format is FORMATS["harmony"]
        )

    def within_context(self, llm: Generator, limit_name: str, ignored: IgnoredFields) -> "Conversation":
        """Return the conversation with an output that fits in the context: see `within_context`."""
        length = len(self.prompt.ids)
        return replace(self, params=within_context(llm, self.params, length, "messages", limit_name, ignored))

    def reader(self) -> OutputReader:
        """Return a parser for one reply."""
        if self.channels:
            tools = self.tools
            return HarmonyParser(tools.schemas if tools else {}, tools.parallel if tools else True)
        thoughts = ReasoningParser(self.thinking, self.prompt.text or "") if self.thinking else None
        return MessageParser(thoughts, self.tools.reader() if self.tools else None)


def chat_tools(context: AppContext, body: ChatRequest, ignored: IgnoredFields | None = None) -> Tools | None:
    """Return the tools that the model may call. Parts of them without effect are added to `ignored`. Raises
    RequestError naming the field at fault."""
    settings, tokenizer = context.settings, context.llm.tokenizer
    thinking = find_reasoning_format(settings.reasoning_parser, tokenizer.template_signs)
    opening = thinking.openings[0] if thinking else ""
    ignored = IgnoredFields(strict=False) if ignored is None else ignored
    return requested_tools(body, settings.tool_parser, tokenizer, opening, ignored)


def rendered(
    context: AppContext, body: ChatRequest, charge: Charge, tools: Tools | None = None
) -> RenderedConversation:
    """Render the conversation to a text, or to token ids. Raises RequestError if it cannot be rendered."""
    llm = context.llm
    max_model_len = llm.model.max_model_len
    if len(body.messages) > max_model_len:
        tokens = len(body.messages)
        raise context_overflow(tokens, max_model_len, max_model_len, "messages", at_least=True)
    messages = checked_messages(body.messages, charge)
    if llm.tokenizer.chat_template is None:
        _check_length(llm, messages)
    recognized = context.settings.special_tokens_in_messages
    return render_conversation(
        _renderer(context, body.chat_template),
        messages,
        (lambda text: ()) if recognized else llm.tokenizer.special_spans,
        tools=tools.rendered if tools else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )


def _renderer(context: AppContext, template: str | None) -> Renderer:
    """Return the model's template, or the `template` of a request. Raises RequestError if the model has none,
    if the operator does not allow templates of requests, or if the request's template does not compile."""
    llm = context.llm
    if template is None:
        return require(llm.chat_template)
    if not context.settings.trust_request_chat_template:
        raise RequestError(
            "chat_template: this server renders conversations with its own template only: leave it out, or "
            "start the server with --trust-request-chat-template",
            field="chat_template",
        )
    try:
        llm.tokenizer.check_takes_template()
    except CheckpointError as error:
        raise RequestError(str(error), field="chat_template") from error
    return given_template(template, tuple(llm.tokenizer.special_tokens.items()))


def _check_length(llm: Generator, messages: list[dict[str, Any]]) -> None:
    """Raise RequestError if the conversation has more characters than a full context of the longest
    tokens."""
    contents = [message.get("content") or "" for message in messages]
    texts = [part.get("text", "") for content in contents if isinstance(content, list) for part in content]
    length = sum(map(len, texts)) + sum(len(content) for content in contents if isinstance(content, str))
    max_model_len, longest_token = llm.model.max_model_len, llm.tokenizer.longest_token
    if length > max_model_len * longest_token:
        tokens = -(-length // longest_token)
        raise context_overflow(tokens, max_model_len, max_model_len, "messages", at_least=True)


async def chat_prompt(
    context: AppContext,
    body: ChatRequest,
    max_tokens: int | None,
    charge: Charge,
    tools: Tools | None = None,
    ignored: IgnoredFields | None = None,
) -> EncodedPrompt:
    """Return the conversation's prompt. What the template leaves out or gets in another form is added to
    `ignored`. Raises RequestError if the template cannot render the conversation."""
    llm = context.llm
    before = charge.held

    def render() -> RenderedConversation:
        charge.set(before)
        return rendered(context, body, charge, tools)

    large = before > LARGE_REQUEST or body.chat_template is not None  # compiling a template takes long, too
    conversation = await context.side_thread.render(large, render)
    if ignored is not None:
        for name, warning in conversation.warnings.items():
            ignored.add(name, warning)
    text = conversation.prompt
    truncate_to = truncation_limit(llm, body.truncate_prompt_tokens, max_tokens)
    if isinstance(text, list):
        charge.add(TOKEN_BYTES * len(text))
        ids = text if truncate_to is None else text[-truncate_to:]
        return EncodedPrompt(ids, llm.tokenizer.decode(ids, skip_special_tokens=False))
    encoder = Encoder(llm, context.side_thread, charge)
    prompt = (await encoder.encode([text], body.add_special_tokens, "messages", truncate_to))[0]
    # Decoded again: it may be truncated.
    return EncodedPrompt(prompt.ids, prompt.echo(llm.tokenizer, skip_special_tokens=False))


async def prepared(
    context: AppContext,
    body: ChatRequest,
    charge: Charge,
    ignored: IgnoredFields,
    prompt: EncodedPrompt | None = None,
) -> Conversation:
    """Validate `body` and prepare it. `prompt` is its prompt, if known already; see `chat_prompt`. Parts of
    the body without effect are added to `ignored`.

    Raises RequestError naming the field at fault.
    """
    tokenizer = context.llm.tokenizer
    params = chat_sampling(body, context.settings.default_sampling, context.llm.model.vocab_size)
    large = charge.held > LARGE_REQUEST or any(tool.get("type") == "custom" for tool in body.tools)
    tools = await context.grammar_thread.run_if(large, lambda: chat_tools(context, body, ignored))
    prompt = prompt or await chat_prompt(context, body, params.max_tokens, charge, tools, ignored)
    thinking = find_reasoning_format(context.settings.reasoning_parser, tokenizer.template_signs)
    if tools is not None:
        await _check_texts(context.llm, tools)
    requested = await context.grammar_thread.run_if(
        wants_grammar(body), lambda: _requested_grammar(body, tools, ignored)
    )
    if requested is not None:
        requested = _after_reasoning(requested, thinking, prompt.text or "", tokenizer)
        await _check_grammar(context.llm, requested, tools)
        params = msgspec.structs.replace(params, grammar=requested.grammar)
    marks = list(thinking.marks) if thinking else []
    if tools:
        marks += tools.format.marks
    if any(tokenizer.special_id(mark) is not None for mark in marks):
        params = msgspec.structs.replace(params, skip_special_tokens=False)  # the parsers need to see them
    conversation = Conversation(prompt, params, tools, thinking)
    if conversation.channels and requested is not None:
        message = f"{requested.field}: replies in this model's format, harmony, cannot be constrained"
        raise RequestError(message, field=requested.field)
    return conversation


async def _check_texts(llm: Generator, tools: Tools) -> None:
    """Raise RequestError if the grammar of a custom tool's input does not compile, whether or not outputs are
    constrained by it."""
    for path, grammar in tools.texts.items():
        try:
            await llm.check_grammar(Grammar(kind="lark", text=grammar.lark), path)
        except RequestError as error:
            raise RequestError(
                error.message, field="tools", status=error.status, retry_after=error.retry_after
            ) from error


async def _check_grammar(llm: Generator, requested: RequestedGrammar, tools: Tools | None) -> None:
    """Raise RequestError if outputs cannot be constrained by the grammar. If this is due to the schema of one
    function, the error names it."""
    try:
        await llm.check_grammar(requested.grammar, requested.field)
    except RequestError as error:
        if error.status == 400 and requested.field == "tools" and tools is not None:
            for path, schema in tools.constrained.items():
                try:
                    await llm.check_grammar(json_grammar(schema, "tools"), path)
                except RequestError as cause:
                    raise RequestError(cause.message, field="tools", status=cause.status) from error
        raise


def _requested_grammar(
    body: ChatRequest, tools: Tools | None, ignored: IgnoredFields
) -> RequestedGrammar | None:
    """Return the grammar of the output, or None. With tools, it is the tools' grammar: it also contains the
    response_format, for messages without calls."""
    requested = requested_grammar(body, ignored)
    if tools is None:
        return requested
    if requested is not None and requested.field != "response_format":
        raise RequestError(
            f"{requested.field} cannot be combined with tools, unless tool_choice is none",
            field=requested.field,
        )
    return RequestedGrammar(tools.grammar, "tools") if tools.grammar else None


def _after_reasoning(
    requested: RequestedGrammar, thinking: ReasoningFormat | None, prompt: str, tokenizer: Tokenizer
) -> RequestedGrammar:
    """Apply the grammar only after the reasoning, if the model reasons first."""
    thoughts = ReasoningParser(thinking, prompt) if thinking else None
    if thoughts is None or not (thoughts.open or thoughts.undecided):
        return requested
    assert thinking
    opening, closing = thinking.openings[0], thinking.closings[0]
    opening_id, closing_id = tokenizer.special_id(opening), tokenizer.special_id(closing)
    grammar = msgspec.structs.replace(requested.grammar, after=closing if closing_id is None else closing_id)
    if thoughts.undecided:
        grammar = msgspec.structs.replace(grammar, opening=opening if opening_id is None else opening_id)
    return RequestedGrammar(grammar, requested.field)
