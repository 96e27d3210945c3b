"""Renders a conversation so that the prompt has the text of every message, and no control token that a client
wrote.

A chat template does not support every conversation that clients send: it may refuse a system message after
the first message, or leave out messages of the role developer. Such conversations are arranged in a form that
it supports. Then the prompt is searched for the text of each message.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from streamserve.protocol.errors import RequestError
from streamserve.text.chat import Message, Renderer
from streamserve.text.prompt_text import FindSpans, Placeholders, PromptText
from streamserve.text.template_limits import MAX_TOTAL, ensure_quick

_INPUTS = ("system", "developer", "user", "tool")
_MAX_NAMED = 16
"""Maximum number of messages that a warning names."""


@dataclass(frozen=True)
class RenderedConversation:
    """A prompt as a text, or as token ids. `warnings` says, by field, what differs from the conversation."""

    prompt: PromptText | list[int]
    warnings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Arrangement:
    """A conversation in a form that more templates support, and the warning about it.

    `last_resort`: only for templates that refuse all other forms.
    """

    messages: Sequence[Any]
    warning: str = ""
    last_resort: bool = False


@dataclass(frozen=True)
class _Attempt:
    """The prompt of an arrangement, and the indices of the messages whose content is not in it."""

    prompt: PromptText | list[int]
    warning: str
    missing: list[int]


def render_conversation(
    renderer: Renderer, messages: Sequence[Message], find_special: FindSpans, **options: Any
) -> RenderedConversation:
    """Render `messages`. `options` are the other arguments of Renderer.render.

    Texts of special tokens that `find_special` finds in messages and tools, except in messages of the
    assistant, are literal parts of the prompt. Raises RequestError if the template refuses the conversation,
    or leaves out the last message of the roles user and tool.
    """
    attempts: list[_Attempt] = []
    refusals: list[RequestError] = []
    for attempt in _attempts(renderer, messages, Placeholders(find_special), options):
        if isinstance(attempt, RequestError):
            refusals.append(attempt)
        else:
            attempts.append(attempt)
            if not attempt.missing:
                break
    if not attempts:
        raise refusals[0]
    best = min(attempts, key=lambda attempt: len(attempt.missing))
    if (last := _last_input(messages)) in best.missing:
        raise RequestError(
            f"the chat template leaves out the content of messages[{last}]: the model would not see it",
            field="messages",
        )
    return RenderedConversation(best.prompt, _warnings(messages, best))


def _attempts(
    renderer: Renderer, messages: Sequence[Message], placeholders: Placeholders, options: dict[str, Any]
) -> Iterator[_Attempt | RequestError]:
    """Yield the result of rendering each arrangement of the conversation, or the error."""
    try:
        hidden = placeholders.hide_messages(messages)
        tools = placeholders.hide(options.get("tools"))
    except RecursionError as error:
        raise RequestError("messages are nested too deeply", field="messages") from error
    refused = True
    for arrangement in _arrangements(hidden):
        if arrangement.last_resort and not refused:
            continue
        try:
            rendered = renderer.render(arrangement.messages, **{**options, "tools": tools})
        except RequestError as error:
            yield error
            continue
        refused = False
        if isinstance(rendered, list):
            yield _Attempt(rendered, arrangement.warning, [])
        else:
            prompt = placeholders.restore(rendered)
            yield _Attempt(prompt, arrangement.warning, _missing(prompt.text, messages))


def _arrangements(messages: Sequence[Any]) -> Iterator[_Arrangement]:
    """Yield the conversation as it is, and then forms of it that more templates support: developer messages
    as system messages, all system messages as one at the start, and consecutive user messages as one. For
    templates without system messages, these become a part of the first user message."""
    yield _Arrangement(messages)
    if any(_role(message) == "developer" for message in messages):
        messages = [
            {**message, "role": "system"} if _role(message) == "developer" else message
            for message in messages
        ]
        yield _Arrangement(messages)
    late = [index for index, message in enumerate(messages) if index and _role(message) == "system"]
    systems = [message for message in messages if _role(message) == "system"]
    others = [message for message in messages if _role(message) != "system"]
    if late:
        moved = [_together(systems), *others]
        warning = f"{_named(late)}, system, is part of the system message at the start"
        yield _Arrangement(moved, warning)
        users = _users_together(moved)
        if len(users) < len(moved):
            yield _Arrangement(users, f"{warning}; consecutive user messages are one")
    if systems:
        instructions = {**_together(systems), "role": "user"}
        warning = "system messages are refused: their text begins the first user message"
        yield _Arrangement(_users_together([instructions, *others]), warning, last_resort=True)


def _users_together(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with consecutive messages of the user as one."""
    together: list[Any] = []
    for role, group in groupby(messages, _role):
        users = list(group)
        together += [_together(users)] if role == "user" and len(users) > 1 else users
    return together


def _together(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one message with the contents of several."""
    texts = ["".join(_texts(message)) for message in messages]
    return {**messages[0], "content": "\n\n".join(text for text in texts if text)}


def _missing(prompt: str, messages: Sequence[Any]) -> list[int]:
    """Return the indices of the messages whose content is not in the prompt.

    Messages of the assistant are not searched: templates leave out reasoning and rewrite calls.
    """
    search = _Search(prompt)
    return [
        index
        for index, message in enumerate(messages)
        if _role(message) in _INPUTS and not all(map(search.has, _texts(message)))
    ]


class _Search:
    """Finds texts in a prompt. Each search starts after the text found before, because most texts are in
    order.

    Templates strip texts, and write some as JSON: a text also counts as found in these forms. After searching
    `MAX_TOTAL` characters in vain, every text counts as found, so that the time is bounded.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._position = 0
        self._read = 0
        self._forms: list[Callable[[str], str]] = [str, _as_json, _as_ascii_json]

    def has(self, text: str) -> bool:
        """Return whether the prompt has a text, apart from whitespace at its ends."""
        text = text.strip()
        if not text or self._read > MAX_TOTAL:
            return True
        for start in (self._position, 0):
            for form in self._forms:
                written = form(text)
                if (position := self._prompt.find(written, start)) >= 0:
                    self._position = position + len(written)
                    self._forms.sort(key=lambda each: each is not form)
                    return True
                self._read += len(self._prompt)
                ensure_quick(self._read)
        return False


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list | tuple) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else None


def _last_input(messages: Sequence[Any]) -> int | None:
    inputs = [index for index, message in enumerate(messages) if _role(message) in ("user", "tool")]
    return inputs[-1] if inputs else None


def _warnings(messages: Sequence[Any], attempt: _Attempt) -> dict[str, str]:
    warnings = {}
    if attempt.warning:
        warnings["messages.role"] = f" ({attempt.warning})"
    if attempt.missing:
        roles = " and ".join(dict.fromkeys(str(_role(messages[index])) for index in attempt.missing))
        named = f"{_named(attempt.missing)}, {roles}, not in the prompt"
        warnings["messages.content"] = f" ({named}: the chat template leaves it out)"
    return warnings


def _named(indices: Sequence[int]) -> str:
    more = f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else ""
    return " ".join(f"messages[{index}]" for index in indices[:_MAX_NAMED]) + more
