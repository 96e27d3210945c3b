"""The two prompt templates of a stream: a text, or a chat whose last message holds the template."""

from typing import Any, Protocol

import msgspec

from streamserve.api.generation import AppContext, GenerationTask
from streamserve.api.http.body import checked
from streamserve.api.http.sse import Emit
from streamserve.api.openai.chat import Chat
from streamserve.api.openai.completions import Completion
from streamserve.api.openai.conversation import chat_text, chat_tools, prepared
from streamserve.api.openai.prompts import Prompt
from streamserve.api.openai.schemas import ChatRequest, CompletionRequest
from streamserve.api.prompt_streams.schemas import (
    DEFAULT_TEMPLATE,
    ONLY_OF_CHATS,
    FinishRequest,
    StreamRequest,
)
from streamserve.protocol.errors import RequestError
from streamserve.text.arriving import CONTEXT, QUERY, Template

_MARK = "\ue000"
"""Placeholder that marks the position of the context in the prompt."""


class Answer(Protocol):
    """A reply in one of OpenAI's formats, produced by a job."""

    async def whole(self, jobs: list[GenerationTask]) -> bytes: ...

    async def stream(self, jobs: list[GenerationTask], emit: Emit) -> None: ...


class TextForm:
    """A text prompt: the filled template; the answer is a completion."""

    def __init__(self, door: AppContext, wanted: StreamRequest) -> None:
        for name in ONLY_OF_CHATS:
            if _given(wanted, name):
                raise RequestError(f"{name} needs messages", field=name)
        source = DEFAULT_TEMPLATE if wanted.template is None else wanted.template
        self._door = door
        self._template = _template(source, "template", wanted.query)
        self._query = wanted.query
        self._request = checked({**_common(wanted, CompletionRequest), "prompt": ""}, CompletionRequest, {})
        self.add_special_tokens = self._request.add_special_tokens
        self.wants_events = self._request.stream

    def text(self, context: str) -> str:
        """Return the whole prompt around `context`."""
        return self._template.render(context, self._query)

    async def answer(self, prompt: Prompt, finish: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Return the answer and the job for `prompt`. Raises RequestError naming the field at fault."""
        completion = Completion(self._door, _finished(self._request, finish))
        await completion.check()
        return completion, completion.job(0, prompt)


class ChatForm:
    """A chat prompt, rendered by the model's chat template; the answer is the next message."""

    def __init__(self, door: AppContext, wanted: StreamRequest) -> None:
        messages = wanted.messages or []
        if wanted.template is not None:
            raise RequestError("template is for texts: the last message is the template", field="template")
        last = messages[-1] if messages else {}
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise RequestError(
                f"the last of messages must be the user's, a text with {CONTEXT} in it", field="messages"
            )
        self._door = door
        self._template = _template(last["content"], f"messages[{len(messages) - 1}].content", wanted.query)
        self._query = wanted.query
        self._request = checked(_common(wanted, ChatRequest), ChatRequest, {})
        self.add_special_tokens = self._request.add_special_tokens
        self.wants_events = self._request.stream

    def text(self, context: str) -> str:
        """Return the whole prompt around `context`.

        Raises RequestError if the chat template cannot render it.
        """
        request = self._filled(context)
        with self._door.memory.charge() as charge:
            return chat_text(self._door.llm, request, charge, chat_tools(self._door, request))

    async def answer(self, prompt: Prompt, finish: FinishRequest) -> tuple[Answer, GenerationTask]:
        """Return the answer and the job for `prompt`. Raises RequestError naming the field at fault."""
        request = _finished(self._request, finish)
        with self._door.memory.charge() as charge:
            chat = Chat(self._door, request, await prepared(self._door, request, charge, prompt))
        return chat, chat.job()

    def _filled(self, context: str) -> ChatRequest:
        *before, last = self._request.messages
        content = self._template.render(context, self._query)
        return msgspec.structs.replace(self._request, messages=[*before, {**last, "content": content}])


Form = TextForm | ChatForm


def form_of(door: AppContext, wanted: StreamRequest) -> Form:
    """Return the prompt template that a request asks for. Raises RequestError naming the field at fault."""
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if _given(wanted, name):
            raise RequestError(f"{name} is not supported: the prompt is computed as it arrives", field=name)
    return TextForm(door, wanted) if wanted.messages is None else ChatForm(door, wanted)


def behind_context(form: Form) -> str:
    """Return the text after the context, with which every prompt of this template ends."""
    return form.text(_MARK).partition(_MARK)[2]


def _template(source: str, field: str, query: str) -> Template:
    template = Template.parse(source, field)
    if query and not template.has_query:
        raise RequestError(f"query needs {QUERY} in {field}", field="query")
    return template


def _given(wanted: StreamRequest, name: str) -> bool:
    defaults = {field.name: field for field in msgspec.structs.fields(StreamRequest)}
    field = defaults[name]
    unset = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return bool(getattr(wanted, name) != unset)


def _common(wanted: StreamRequest, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields that the request sets and `kind` has too."""
    names = [name for name in kind.__struct_fields__ if name in StreamRequest.__struct_fields__]
    return {name: msgspec.to_builtins(getattr(wanted, name)) for name in names if _given(wanted, name)}


def _finished(request: Any, finish: FinishRequest) -> Any:
    """Return `request` with the stream options of the finish request."""
    said = {name: getattr(finish, name) for name in ("stream", "stream_options")}
    given = {name: value for name, value in said.items() if value is not None}
    return msgspec.structs.replace(request, **given)
