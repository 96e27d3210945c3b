"""Converts a request of /v1/responses to the equivalent chat request."""

from collections.abc import Sequence
from typing import Any, NoReturn

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.custom_tools import custom_arguments
from streamserve.api.openai.schemas import ChatRequest, SamplingFields
from streamserve.api.openai.thinking import checked_effort
from streamserve.extras.responses.response_schemas import LOGPROBS, ResponseRequest
from streamserve.extras.responses.response_tools import ResponseTools, chosen_tool, flat_name
from streamserve.protocol.errors import RequestError

TEXT_PARTS = ("input_text", "output_text", "text")
PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs"})
ITEM_FIELDS = {
    "message": {"role", "content", "id", "status", "phase"},
    "function_call": {"call_id", "name", "namespace", "arguments", "id", "status"},
    "function_call_output": {"call_id", "output", "id", "status"},
    "custom_tool_call": {"call_id", "name", "namespace", "input", "id", "status"},
    "custom_tool_call_output": {"call_id", "name", "output", "id", "status"},
    "reasoning": {"content", "summary", "id", "status", "encrypted_content"},
}
SKIPPED_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_call",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items about tools that other servers run. They are left out of the prompt with a warning."""

_SUMMARY = "send the summary as a message"
_ENCRYPTED = f"only the server that compacted a conversation can read its compaction: {_SUMMARY}"
_REFUSED_ITEMS = {
    "compaction": _ENCRYPTED,
    "compaction_summary": _ENCRYPTED,
    "compaction_trigger": f"this server does not compact conversations: ask for a summary, and {_SUMMARY}",
    "item_reference": "references are not supported: send the item itself, or previous_response_id",
}
"""What to send instead of items that are refused because the prompt would lack their text. The first name of
Codex for compactions was compaction_summary."""

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "format.json_schema": "format",
}
"""Names of the Responses API for fields that a chat request names differently."""


def as_chat(
    body: ResponseRequest,
    tools: ResponseTools,
    ignored: IgnoredFields,
    history: Sequence[dict[str, Any]] = (),
) -> ChatRequest:
    """Convert to a chat request with these `tools`. The items of `history` come before the input. Items that
    are left out are added to `ignored`.

    Raises RequestError naming the field of the Responses API.
    """
    common = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    logprobs = LOGPROBS in body.include
    for part in body.include:
        if part != LOGPROBS:
            _refuse(f"include: {part!r} is not supported", "include")
    if body.top_logprobs is not None and not logprobs:
        raise RequestError(f'top_logprobs needs "{LOGPROBS}" in include', field="top_logprobs")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}", field="max_output_tokens"
        )
    fields: dict[str, Any] = {
        "messages": _messages(body, history, ignored),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": checked_effort((body.reasoning or {}).get("effort"), "reasoning.effort"),
        **_format(body),
        **_tools(body, tools),
    }
    return ChatRequest(**common, **fields)


def _messages(
    body: ResponseRequest, history: Sequence[dict[str, Any]], ignored: IgnoredFields
) -> list[dict[str, Any]]:
    """Convert the items to messages. Reasoning and function calls become parts of the assistant's message."""
    chat: list[dict[str, Any]] = []
    if body.instructions is not None:
        chat.append({"role": "system", "content": body.instructions})
    items = input_items(body)
    if not items:
        raise RequestError("input must hold at least one item", field="input")
    for index, item in enumerate([*history, *items], -len(history)):
        if isinstance(item.get("type"), str) and item["type"] in SKIPPED_ITEMS:
            ignored.add(f"input[{item['type']}]")
        else:
            _add_item(chat, item, f"input[{index}]")
    for message in chat:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    if not chat:
        raise RequestError("input must hold an item that is not left out", field="input")
    return chat


def _add_item(chat: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item as a message, or to the last message if both are parts of one reply: reasoning begins a
    reply, then come text and calls. The reasoning of a message is a list of texts."""
    kind = _checked_kind(item, where)
    if kind.endswith("_output"):
        output = _content(item.get("output"), f"{where}.output")
        chat.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
        return
    if kind == "message" and item.get("role") != "assistant":
        chat.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
        return
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    if kind == "reasoning":
        reasoning = _reasoning(item, where)
        if reasoning and (last is None or last.keys() - {"role", "reasoning_content"}):
            chat.append({"role": "assistant"})
        if reasoning:
            chat[-1].setdefault("reasoning_content", []).append(reasoning)
    elif kind.endswith("_call"):
        if last is None:
            chat.append({"role": "assistant"})
        chat[-1].setdefault("tool_calls", []).append(_call(item, where))
    else:
        content = _content(item.get("content"), f"{where}.content")
        if last is None or ("content" in last and "tool_calls" not in last):
            chat.append({"role": "assistant"})
        _add_content(chat[-1], content)


def _add_content(message: dict[str, Any], content: str | list[dict[str, str]]) -> None:
    """Add the text of a reply after a call to the text before it. The list of parts grows in place: a reply
    may have tens of thousands of texts."""
    before = message.get("content", "")
    if not (before and content):
        message["content"] = before or content
        return
    if isinstance(before, str):
        before = message["content"] = [{"type": "text", "text": before}]
    before += [{"type": "text", "text": content}] if isinstance(content, str) else content


def input_items(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the input as items."""
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def _checked_kind(item: dict[str, Any], where: str) -> str:
    kind = item.get("type") or "message"
    if isinstance(kind, str) and kind in _REFUSED_ITEMS:
        _refuse(f"{where}: {_REFUSED_ITEMS[kind]}")
    if not isinstance(kind, str) or kind not in ITEM_FIELDS:
        _refuse(f"{where}: items of type {kind!r} are not supported")
    for name, value in item.items():
        if name not in {"type", *ITEM_FIELDS[kind]} and value is not None:
            _refuse(f"{where}.{name} is not a known field")
    if not isinstance(item.get("id"), str | None):
        _refuse(f"{where}.id must be a string")
    if item.get("encrypted_content") is not None:
        _refuse(f"{where}.encrypted_content is not supported")
    return kind


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """Return a text, or a list of text parts in the format of chats."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"{where} must be a string or a list of parts")
    return [{"type": "text", "text": _part(part, where)} for part in content] or ""


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        _refuse(f"{where} must be a string, or a list of parts with a type")
    if part["type"] not in TEXT_PARTS:
        _refuse(f"{where}: parts of type {part['type']!r} are not supported")
    for name, value in part.items():
        if name not in PART_FIELDS and value is not None:
            _refuse(f"{where}: {name} of a part is not a known field")
    return _text(part, "text", where)


def _reasoning(item: dict[str, Any], where: str) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        _refuse(f"{where}.content must be a list of parts")
    return "".join(_text(part, "text", f"{where}.content") for part in parts)


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a function call, or the call of the function in place of a custom tool."""
    namespace = None if item.get("namespace") is None else _text(item, "namespace", where)
    name = flat_name(namespace, _text(item, "name", where))
    custom = item["type"] == "custom_tool_call"
    arguments = custom_arguments(_text(item, "input", where)) if custom else _text(item, "arguments", where)
    function = {"name": name, "arguments": arguments}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        _refuse(f"{where}.{name} must be a string")
    return value


def _refuse(message: str, field: str = "input") -> NoReturn:
    raise RequestError(message, field=field)


def _format(body: ResponseRequest) -> dict[str, Any]:
    """Convert `text.format` to a chat's response_format."""
    settings = {name: value for name, value in (body.text or {}).items() if value is not None}
    for name, value in settings.items():
        if name != "format" and (name, value) != ("verbosity", "medium"):
            _refuse(f"text.{name} is not supported", "text")
    format = settings.get("format", {"type": "text"})
    if not isinstance(format, dict) or format.get("type") not in ("text", "json_object", "json_schema"):
        _refuse("text.format must have a type: text, json_object or json_schema", "text")
    if format == {"type": "text"}:
        return {}
    if format["type"] != "json_schema":
        return {"response_format": format}
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {name: value for name, value in format.items() if name != "type"},
        }
    }


def _tools(body: ResponseRequest, tools: ResponseTools) -> dict[str, Any]:
    """Return the tools and tool_choice in the format of chats."""
    choice = chosen_tool(body.tool_choice)
    if not tools.converted and choice in (None, "none", "auto"):
        return {}
    return {
        "tools": tools.converted,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
