"""The two kinds of prompt templates of a stream: a text, and a chat whose last message contains the
template."""

from typing import Any, Protocol

import msgspec

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask
from streamserve.api.http.body import checked
from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.http.sse import Emit
from streamserve.api.openai.chat import Chat
from streamserve.api.openai.completions import Completion
from streamserve.api.openai.conversation import chat_tools, prepared, rendered
from streamserve.api.openai.schemas import ChatRequest, CompletionRequest
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.prompt_streams.schemas import (
    DEFAULT_TEMPLATE,
    ONLY_OF_CHATS,
    FinishRequest,
    StreamRequest,
)
from streamserve.protocol.errors import RequestError
from streamserve.text.prompt_chunks import CONTEXT, QUERY, Template
from streamserve.text.prompt_text import PromptText

_MARK = "\ue000"
"""Placeholder that marks the position of the context in the prompt."""


class Answer(Protocol):
    """A reply in one of OpenAI's formats, produced by a task."""

    async def whole(self, tasks: list[GenerationTask]) -> bytes:
        """Run the tasks to their end; return the reply as JSON. Raises RequestError if a task fails."""

    async def stream(self, tasks: list[GenerationTask], emit: Emit) -> None:
        """Run the tasks, and send an event for each delta. Raises RequestError if a task fails."""


class TextPromptTemplate:
    """A text prompt: the filled template. The answer is a completion."""

    def __init__(self, context: AppContext, body: StreamRequest) -> None:
        for name in ONLY_OF_CHATS:
            if _is_set(body, name):
                raise RequestError(f"{name} needs messages", field=name)
        source = DEFAULT_TEMPLATE if body.template is None else body.template
        self._context = context
        self._template = _template(source, "template", body.query)
        self._query = body.query
        self._request = checked({**_common(body, CompletionRequest), "prompt": ""}, CompletionRequest)
        self.add_special_tokens = self._request.add_special_tokens
        self.wants_events = self._request.stream

    def text(self, context_text: str) -> PromptText:
        """Return the whole prompt around `context_text`. Special tokens are recognized in all of it."""
        return PromptText(self._template.render(context_text, self._query))

    async def answer(self, prompt: EncodedPrompt, finish: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Return the answer and the task for `prompt`. Raises RequestError naming the field at fault."""
        completion = Completion(self._context, _finished(self._request, finish))
        await completion.check(IgnoredFields(strict=True))
        (task,) = await completion.tasks([prompt])
        return completion, task


class ChatPromptTemplate:
    """A chat prompt, rendered by the model's chat template. The answer is the next message."""

    def __init__(self, context: AppContext, body: StreamRequest) -> None:
        messages = body.messages or []
        if body.template is not None:
            raise RequestError(
                "template cannot be combined with messages: the last message is the template",
                field="template",
            )
        last = messages[-1] if messages else {}
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise RequestError(
                f"the last message must have the role user, and a text that contains {CONTEXT}",
                field="messages",
            )
        self._context = context
        self._template = _template(last["content"], f"messages[{len(messages) - 1}].content", body.query)
        self._query = body.query
        self._request = checked(_common(body, ChatRequest), ChatRequest)
        self.add_special_tokens = self._request.add_special_tokens
        self.wants_events = self._request.stream

    def text(self, context_text: str) -> PromptText:
        """Return the whole prompt around `context_text`, in which no special tokens are recognized.

        Raises RequestError if the chat template cannot render it, or leaves out a message.
        """
        request = self._filled(context_text)
        with self._context.memory.charge() as charge:
            tools = chat_tools(self._context, request)
            conversation = rendered(self._context, request, charge, tools)
        if isinstance(conversation.prompt, list):
            message = "this model's tokenizer renders no text: a stream of messages needs a chat template"
            raise RequestError(message, field="messages")
        if missing := conversation.warnings.get("messages.content"):
            raise RequestError(f"messages.content has no effect{missing}", field="messages")
        return conversation.prompt

    async def answer(self, prompt: EncodedPrompt, finish: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Return the answer and the task for `prompt`. Raises RequestError naming the field at fault."""
        request = _finished(self._request, finish)
        with self._context.memory.charge() as charge:
            strict = IgnoredFields(strict=True)
            conversation = await prepared(self._context, request, charge, strict, prompt)
        chat = Chat(self._context, request, conversation)
        return chat, chat.task()

    def _filled(self, context_text: str) -> ChatRequest:
        *before, last = self._request.messages
        content = self._template.render(context_text, self._query)
        return msgspec.structs.replace(self._request, messages=[*before, {**last, "content": content}])


PromptTemplate = TextPromptTemplate | ChatPromptTemplate


def prompt_template(context: AppContext, body: StreamRequest) -> PromptTemplate:
    """Return the prompt template that a request asks for. Raises RequestError naming the field at fault."""
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if _is_set(body, name):
            raise RequestError(f"{name} is not supported: the prompt is computed as it arrives", field=name)
    return TextPromptTemplate(context, body) if body.messages is None else ChatPromptTemplate(context, body)


def text_after_context(template: PromptTemplate) -> str:
    """Return the text after the context: every prompt of this template ends with it."""
    return template.text(_MARK).text.partition(_MARK)[2]


def _template(source: str, field: str, query: str) -> Template:
    template = Template.parse(source, field)
    if query and not template.has_query:
        raise RequestError(f"query needs {QUERY} in {field}", field="query")
    return template


def _is_set(body: StreamRequest, name: str) -> bool:
    defaults = {field.name: field for field in msgspec.structs.fields(StreamRequest)}
    field = defaults[name]
    unset = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return bool(getattr(body, name) != unset)


def _common(body: StreamRequest, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields that the request sets and that also exist in `kind`."""
    names = [name for name in kind.__struct_fields__ if name in StreamRequest.__struct_fields__]
    return {name: msgspec.to_builtins(getattr(body, name)) for name in names if _is_set(body, name)}


def _finished(request: Any, finish: FinishRequest) -> Any:
    """Return `request` with the stream options of the finish request."""
    options = {name: getattr(finish, name) for name in ("stream", "stream_options")}
    values = {name: value for name, value in options.items() if value is not None}
    return msgspec.structs.replace(request, **values)
