"""Convert a request of /v1/messages to the equivalent chat request."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.call_arguments import arguments_object
from streamserve.api.openai.schemas import ChatRequest, SamplingFields
from streamserve.api.openai.thinking import checked_effort
from streamserve.extras.anthropic.schemas import CountTokensRequest, MessagesRequest
from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "format.json_schema": "format",
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
    ".function.strict": ".strict",
}
"""Names of the Messages API for fields that a chat request names differently."""

BILLING = "x-anthropic-billing-header:"
"""Prefix of a system block in which Claude Code sends a header, not a text. It differs in each request, so no
prompt that contained it would be found in the cache."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "disabled")
_BLOCK_FIELDS = {
    "text": {"text"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content"},
}
"""Fields of each block that a prompt can contain, by the block's type."""
_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks that each role may have."""
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "defer_loading": (False,),
    "input_examples": ([],),
    "is_error": (False,),
}
"""Further fields, with the values that have no effect and are accepted without a warning."""
_WITHOUT_EFFECT = {*_ASKS_NOTHING, "cache_control", "eager_input_streaming"}


def as_chat(body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields) -> ChatRequest:
    """Convert to a chat request; fields without effect are added to `ignored`.

    Raises RequestError naming the field of the Messages API.
    """
    messages = _messages(body, ignored)
    prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    if prefilled and "tool_calls" in messages[-1]:
        _refuse("messages: the last one calls tools, so their results must follow it")
    fields: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": not prefilled,
        "continue_final_message": prefilled,
        "chat_template_kwargs": body.chat_template_kwargs,
        **_tools(body, ignored),
        **_output_config(body, ignored),
    }
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
        fields |= {"max_completion_tokens": body.max_tokens, "stop": _stop(body), "metadata": None}
        if body.metadata:
            ignored.add("metadata")
    return ChatRequest(**fields)


def thinking_type(body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields) -> str | None:
    """Return the requested type of thinking, if any. Raises RequestError for an unknown type."""
    thinking = body.thinking
    if thinking is None:
        return None
    if thinking.get("type") not in _THINKING:
        _refuse(f"thinking: type {thinking.get('type')!r} is not one of {', '.join(_THINKING)}", "thinking")
    if thinking.get("budget_tokens") is not None:
        ignored.add("thinking.budget_tokens")
    return str(thinking["type"])


def _stop(body: MessagesRequest) -> list[str] | None:
    other = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return [*body.stop_sequences, *other] or None


def _messages(body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Convert the turns. Consecutive messages of the user become one message; so do the assistant's."""
    chat: list[dict[str, Any]] = []
    system = _system(body, ignored)
    if system:
        chat.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            _refuse(f"{where}.role must be one of {', '.join(_ROLES)}")
        for name in message.keys() - {"role", "content"}:
            ignored.add_unknown(f"messages[].{name}")
        blocks = _blocks(message.get("content"), f"{where}.content", _ROLES[role], ignored)
        for converted in _converted(role, blocks, f"{where}.content", ignored):
            _append(chat, converted)
    for message in chat:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return chat


def _system(body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields) -> list[dict[str, str]]:
    if body.system is None:
        return []
    parts = []
    for index, block in enumerate(_blocks(body.system, "system", ("text",), ignored)):
        text = _text(block, "text", f"system[{index}]")
        if text.startswith(BILLING):
            ignored.add(f"system[{index}]", " as it is a header")
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def _blocks(content: Any, where: str, kinds: tuple[str, ...], ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Return a message's content as blocks. Raises RequestError for a block that is not of these `kinds`."""
    field = field_of(where)
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        _refuse(f"{where} must be a string or a list of blocks", field)
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            _refuse(f"{where}[{index}] must be a block with a type", field)
        if kind not in kinds:
            _refuse(
                f"{where}[{index}]: blocks of type {kind!r} are not supported here, only {', '.join(kinds)}",
                field,
            )
        _note_others(block, {"type", *_BLOCK_FIELDS[kind]}, f"{field}[].content[].", ignored)
    return content


def _note_others(entry: dict[str, Any], known: set[str], inside: str, ignored: IgnoredFields) -> None:
    """Add the unknown fields of a block or a tool to `ignored`, and the fields without effect."""
    for name, value in entry.items():
        if name in known or value is None or value in _ASKS_NOTHING.get(name, ()):
            continue
        if name in _WITHOUT_EFFECT:
            ignored.add(f"{inside}{name}")
        else:
            ignored.add_unknown(f"{inside}{name}")


def _converted(
    role: str, blocks: list[dict[str, Any]], where: str, ignored: IgnoredFields
) -> list[dict[str, Any]]:
    """Convert one message. Each tool result becomes a separate message. The reasoning is a list of texts."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] = {"role": role}
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "tool_result":
            messages.append(_result(block, at, ignored))
        elif block["type"] == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block, at))
        elif block["type"] == "thinking":
            turn.setdefault("reasoning_content", []).append(_text(block, "thinking", at))
        elif text := _text(block, "text", at):
            turn.setdefault("content", []).append({"type": "text", "text": text})
    if len(turn) > 1 or not messages:
        messages.append({"content": "", **turn} if len(turn) == 1 else turn)
    return messages


def _result(block: dict[str, Any], where: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Convert the result of a tool call to a message."""
    content = block.get("content") or ""
    parts = _blocks(content, f"{where}.content", ("text",), ignored)
    text = [{"type": "text", "text": _text(part, "text", f"{where}.content")} for part in parts]
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": text or ""}


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        # A client that collects a stream's events may get any JSON value, or a part of its text.
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        arguments = arguments_object(text)
    function = {"name": _text(block, "name", where), "arguments": arguments}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _append(chat: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message, or extend the last one if it has the same role, user or assistant.

    A newline separates their texts. Its lists grow in place: a conversation may have tens of thousands of
    messages with the same role.
    """
    last = chat[-1] if chat else None
    if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
        chat.append(message)
        return
    if last.get("content") and message.get("content"):
        last["content"].append({"type": "text", "text": "\n"})
    for name in ("content", "tool_calls", "reasoning_content"):
        if message.get(name):
            last[name] = last.get(name) or []
            last[name] += message[name]


def _tools(body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields) -> dict[str, Any]:
    """Convert the tools and the tool choice."""
    tools = [_tool(tool, f"tools[{index}]", ignored) for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools}
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        _refuse("tool_choice must have a type: auto, any, tool or none", "tool_choice")
    serial = choice.get("disable_parallel_tool_use")
    if not isinstance(serial, bool | None):
        _refuse("tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
    return {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": not serial}


def _tool(tool: dict[str, Any], where: str, ignored: IgnoredFields) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        _refuse(f"{where}: type {tool['type']!r} is not supported, only custom tools are", "tools")
    if not isinstance(tool.get("input_schema"), dict):
        _refuse(f"{where}.input_schema must be a JSON schema", "tools")
    _note_others(tool, {"type", "name", "description", "input_schema", "strict"}, "tools[].", ignored)
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _output_config(body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields) -> dict[str, Any]:
    """Convert the output format and the effort."""
    config = {name: value for name, value in (body.output_config or {}).items() if value is not None}
    for name in config.keys() - {"effort", "format"}:
        ignored.add_unknown(f"output_config.{name}")
    fields: dict[str, Any] = {
        "reasoning_effort": checked_effort(config.get("effort"), "output_config.effort")
    }
    format = config.get("format")
    if format is not None:
        if not isinstance(format, dict) or format.get("type") != "json_schema":
            _refuse("output_config.format must have the type json_schema", "output_config")
        schema = {"name": "output", "schema": format.get("schema"), "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _text(entry: dict[str, Any], name: str, where: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        _refuse(f"{where}.{name} must be a string", field_of(where))
    return value


def _refuse(message: str, field: str = "messages") -> NoReturn:
    raise RequestError(message, field=field)
