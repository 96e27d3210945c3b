"""Renders chat messages to a prompt with the checkpoint's jinja template, as apply_chat_template does."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.text.template_limits import BoundedEnvironment, check_nodes, render

Message = Mapping[str, Any]
MAX_GIVEN_TEMPLATE = 1 << 16
"""Limit of the characters of a template that a request or a script gives."""

REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises for a conversation that it does not support."""

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


_TOOLS_OF_MESSAGE = re.compile(r"""\bmessage(\.tools\b|\[['"]tools['"]\])""")
"""Matches templates that read the tools from a field of the system message (Phi-4-mini)."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training. It does not affect the prompt."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled chat template, and the special tokens that it may use.

    `variables` are the names of the inputs that it reads. Raises CheckpointError if `source` is not a jinja
    template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._forms: dict[str, ContentForms] = {}
        self._tools_in_message = "tools" not in self._variables and bool(_TOOLS_OF_MESSAGE.search(source))

    @property
    def variables(self) -> frozenset[str]:
        return self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for `messages` and `tools`. `variables` are further inputs of the template.

        `add_generation_prompt` opens the reply; `continue_final_message` leaves the last message open
        instead. A message's content is a string, or a list of text parts. A list is passed to the template
        if the template renders lists, otherwise as one string. A string is passed as a list of one part if
        the template renders only lists. Raises RequestError for invalid messages, and for messages that the
        template refuses.
        """
        _check_request(messages, add_generation_prompt, continue_final_message, variables or {})
        chat = [self._as_read(message, index) for index, message in enumerate(messages)]
        final = _open_final_message(chat) if continue_final_message else None
        inputs: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        inputs |= {"messages": chat, "tools": list(tools) if tools else None, "documents": None}
        inputs["add_generation_prompt"] = add_generation_prompt
        if (
            tools
            and "xml_tools" in self._variables
            and not {"xml_tools", "python_tools"}.intersection(variables or ())
        ):
            inputs["xml_tools"] = inputs["tools"]  # SmolLM3's name
        if tools and self._tools_in_message:
            inputs["messages"] = _with_tools(chat, tools)
        try:
            prompt = render(self._template.generate(inputs))
        except RecursionError as error:
            raise RequestError("messages are nested too deeply", field="messages") from error
        except MemoryError as error:
            raise RequestError("the chat template needs too much memory", field="messages") from error
        except REFUSALS as error:
            raise RequestError(
                f"the chat template refuses this conversation: {error}", field="messages"
            ) from error
        return prompt if final is None else _truncate_at_mark(prompt, final)

    def _as_read(self, message: Message, index: int) -> dict[str, Any]:
        """Return a message with its content in a form that the template renders."""
        plain = plain_message(message, index)
        content = plain.get("content")
        if not content:
            return plain
        forms = self._content_forms(str(plain.get("role")))
        given = message["content"]
        if isinstance(given, str):
            given = given if forms.strings else [{"text": given}]
        if not isinstance(given, str) and forms.parts:
            plain["content"] = [{"type": "text", "text": part["text"]} for part in given]
        return plain

    def _content_forms(self, role: str) -> "ContentForms":
        """Return which forms of content the template renders in messages of `role`. Trial messages show it:
        the template's source does not, because contents may pass through macros and filters."""
        if role not in _BEFORE:
            return ContentForms(strings=True, parts=False)
        if role not in self._forms:
            before = [self._as_read(message, index) for index, message in enumerate(_BEFORE[role])]
            after = [] if role in ("user", "assistant", "tool") else [self._as_read(_USER, 1)]
            trial = {**_TRIED.get(role, {}), "role": role}
            strings = self._trial([*before, {**trial, "content": _FIRST}, *after])
            listed = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
            parts = re.search(
                rf"{_FIRST}\s*{_SECOND}", self._trial([*before, {**trial, "content": listed}, *after])
            )
            self._forms[role] = ContentForms(strings=_FIRST in strings or not parts, parts=bool(parts))
        return self._forms[role]

    def _trial(self, chat: list[dict[str, Any]]) -> str:
        """Return the rendered conversation; empty if the template refuses it."""
        inputs = {**self._special_tokens, "messages": chat, "tools": None, "documents": None}
        try:
            return render(self._template.generate({**inputs, "add_generation_prompt": False}))
        except (*REFUSALS, RecursionError, MemoryError):
            return ""


@dataclass(frozen=True)
class ContentForms:
    """The forms of content that a template renders for a role: strings, or lists of parts."""

    strings: bool
    parts: bool


_FIRST, _SECOND = "pinewood", "seashell"
_USER: Message = {"role": "user", "content": _FIRST[::-1]}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_BEFORE: dict[str, list[Message]] = {
    "system": [],
    "developer": [],
    "user": [],
    "assistant": [_USER],
    "tool": [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}],
}
"""The messages that must come before a trial message, by its role."""
_TRIED = {"tool": {"name": "f", "tool_call_id": "call00000"}}


class TemplatesByUse:
    """Two chat templates of a checkpoint: `tool_use` renders conversations with tools, `default` all
    others."""

    def __init__(self, default: ChatTemplate, tool_use: ChatTemplate) -> None:
        self._default = default
        self._tool_use = tool_use

    @property
    def variables(self) -> frozenset[str]:
        return self._default.variables | self._tool_use.variables

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """Return the prompt, as ChatTemplate.render does."""
        return (self._tool_use if tools else self._default).render(messages, tools=tools, **options)


def chat_template(
    source: str | None, special_tokens: Mapping[str, str], tool_use: str | None = None
) -> ChatTemplate | TemplatesByUse | None:
    """Return the compiled templates; None if the checkpoint has none. With `tool_use`, this template renders
    conversations with tools.

    Raises CheckpointError if one does not compile.
    """
    if source is None:
        return None
    default = ChatTemplate(source, special_tokens)
    return default if tool_use is None else TemplatesByUse(default, ChatTemplate(tool_use, special_tokens))


@lru_cache(maxsize=8)
def given_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Return a template that a request or a script gives. Raises RequestError if it does not compile, or is
    too long."""
    if len(source) > MAX_GIVEN_TEMPLATE:
        raise RequestError(
            f"chat_template has {len(source)} characters, and {MAX_GIVEN_TEMPLATE} is the limit",
            field="chat_template",
        )
    try:
        return ChatTemplate(source, dict(special_tokens))
    except Exception as error:  # nested too deeply, it fails in the parser or in Python's compiler
        reason = str(error) if isinstance(error, CheckpointError) else type(error).__name__
        raise RequestError(f"chat_template does not compile: {reason}", field="chat_template") from error


class Renderer(Protocol):
    """Renders conversations to a text, or to token ids. `variables` are the names of the inputs that it
    reads."""

    @property
    def variables(self) -> frozenset[str]: ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str | list[int]:
        """Return the prompt for `messages` and `tools`. Raises RequestError for messages that cannot be
        rendered."""


def require(template: Renderer | None) -> Renderer:
    """Return the template. Raises RequestError with a remedy if the checkpoint has none."""
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or put a chat_template.jinja "
            "into the model's folder, or give a file with --chat-template, and start again"
        )
    return template


def _check_request(
    messages: Sequence[Message], generate: bool, proceed: bool, variables: Mapping[str, Any]
) -> None:
    if not messages:
        raise RequestError("messages must hold at least one message", field="messages")
    if generate and proceed:
        raise RequestError(
            "continue_final_message needs add_generation_prompt set to false", field="continue_final_message"
        )
    for name in variables:
        if name in _RESERVED_VARIABLES:
            raise RequestError(
                f"chat_template_kwargs may not set {name}",
                field="chat_template_kwargs",
            )


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """Return a message as the template sees it: without fields that are None, and with its content as one
    string. A message with tool calls but no content gets an empty content: clients leave it out, and
    templates read it."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object with role and content", field="messages")
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "".join(_part_text(part, index) for part in content)
    elif not isinstance(content, str | None):
        raise RequestError(f"messages[{index}].content must be a string or a list of parts", field="messages")
    elif content is None and plain.get("tool_calls"):
        plain["content"] = ""
    return plain


def _part_text(part: Any, index: int) -> str:
    where = f"messages[{index}].content"
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be a string, or a list of parts with a type", field="messages")
    if part["type"] != "text":
        raise RequestError(f"{where}: parts of type {part['type']!r} are not supported", field="messages")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: a text part needs its text", field="messages")
    return str(part["text"])


def _open_final_message(chat: list[dict[str, Any]]) -> str:
    """Append a mark to the last message's content; return the content without it."""
    final = chat[-1].get("content")
    if final is None:
        raise RequestError("continue_final_message: the last message has no content", field="messages")
    if isinstance(final, str):
        chat[-1]["content"] = final + _CONTINUE
        return final
    text = str(final[-1]["text"])
    final[-1]["text"] = text + _CONTINUE
    return text


def _truncate_at_mark(prompt: str, final: str) -> str:
    """Return the prompt up to the mark.

    Templates that strip contents remove the mark's trailing space. If it is missing, trailing whitespace
    before the mark is removed, too.
    """
    position = prompt.rfind(_CONTINUE.strip())
    if position < 0 or final.strip() not in prompt:
        raise RequestError("the chat template drops the message to continue", field="continue_final_message")
    rendered = prompt[:position]
    return rendered if prompt.startswith(_CONTINUE, position) else rendered.rstrip()


def _with_tools(chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the functions as JSON in the system message. If there is no system message,
    one is added."""
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    system = chat[0] if chat[0].get("role") == "system" else {"role": "system", "content": ""}
    return [{**system, "tools": functions}, *(chat[1:] if system is chat[0] else chat)]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON, without the HTML escapes of jinja's filter. Raises TemplateLimitError if the value is
    too large."""
    check_nodes(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
