"""Validation of a chat request's messages. The error names a field that is not supported."""

from collections.abc import Sequence
from typing import Any

from streamserve.api.http.memory import Charge
from streamserve.api.openai.call_arguments import charged_arguments
from streamserve.api.openai.custom_tools import custom_arguments
from streamserve.api.openai.open_calls import OpenCalls
from streamserve.protocol.errors import RequestError

_FIELDS = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
"""Fields of a message that are passed to the chat template, by role."""

_OTHER_FIELDS = ("annotations", "audio", "function_call", "partial", "prefix", "reasoning", "refusal")
"""Known fields that are not passed on: refused if they have a value that would have an effect."""

KNOWN = frozenset(name for fields in _FIELDS.values() for name in fields).union(_OTHER_FIELDS)
PART_FIELDS = frozenset({"type", "text"})
"""Fields of a text part."""


def checked_messages(messages: Sequence[dict[str, Any]], charge: Charge) -> list[dict[str, Any]]:
    """Return `messages` with the fields that are passed to the template.

    Raises RequestError naming an unsupported field. Fields that are null or empty count as absent, because
    clients send replies back unchanged. The arguments of calls, which are JSON inside of JSON, are subject to
    the limits of a request, and charged to `charge`.
    """
    return _with_call_ids(
        [_checked(message, f"messages[{index}]", charge) for index, message in enumerate(messages)]
    )


def _with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with ids of the tools' messages that have none: the ids of the calls before them that
    have no result yet, in order."""
    calls = OpenCalls()
    complete = []
    for message in messages:
        if message["role"] == "assistant":
            calls = OpenCalls()
            for call in message.get("tool_calls", ()):
                if "id" in call:
                    calls.add(call["id"], call["function"]["name"])
        elif message["role"] == "tool":
            answered = message.get("tool_call_id") or calls.first()
            if answered is not None:
                message = {**message, "tool_call_id": answered}
                calls.close(answered)
        complete.append(message)
    return complete


def _checked(message: dict[str, Any], where: str, charge: Charge) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise RequestError(f"{where}: role function is not supported: use tool", field="messages")
    if not isinstance(role, str) or role not in _FIELDS:
        raise RequestError(f"{where}.role must be one of {', '.join(_FIELDS)}", field="messages")
    if role == "assistant" and not message.get("reasoning_content"):
        message = {**message, "reasoning_content": message.get("reasoning"), "reasoning": None}
    for name, value in message.items():
        if name not in KNOWN:
            raise RequestError(f"{where}.{name} is not a known field", field="messages")
        if name not in _FIELDS[role] and value not in (None, [], "", False) and not _repeated(message, name):
            raise RequestError(f"{where}.{name} is not supported", field="messages")
    _check_parts(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls") or []
    if role == "assistant" and not calls and message.get("content") in (None, []):
        message = {**message, "content": ""}  # a reply may end in its reasoning, or be empty
    if message.get("content") is None and not calls:
        raise RequestError(f"{where}.content is required", field="messages")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(name), str | None):
            raise RequestError(f"{where}.{name} must be a string", field="messages")
    checked = {name: message[name] for name in _FIELDS[role] if message.get(name) not in (None, [])}
    if not checked.get("tool_call_id"):
        checked.pop("tool_call_id", None)
    checked.pop("tool_calls", None)
    if calls:
        checked["tool_calls"] = _checked_calls(calls, f"{where}.tool_calls", charge)
    return checked


def _check_parts(content: Any, where: str) -> None:
    """Raise RequestError naming an unknown key of a text part. Parts of other types are refused later."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") == "text":
            for name, value in part.items():
                if name not in PART_FIELDS and value is not None:
                    raise RequestError(f"{where}: {name} of a part is not a known field", field="messages")


def _repeated(message: dict[str, Any], name: str) -> bool:
    """Return whether a field repeats the reasoning: replies contain it under two names."""
    return name == "reasoning" and message[name] == message.get("reasoning_content")


def _checked_calls(calls: Any, where: str, charge: Charge) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", field="messages")
    return [_checked_call(call, f"{where}[{index}]", charge) for index, call in enumerate(calls)]


def _checked_call(call: Any, where: str, charge: Charge) -> dict[str, Any]:
    """Return a call in the form that templates expect: its arguments are an object, not text. Any text is
    accepted: it may be what the model wrote."""
    if isinstance(call, dict) and call.get("type") == "custom":
        call = _function_of(call, where)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RequestError(f"{where} must have the type function, and a function", field="messages")
    if not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where} must have an id and a function's name", field="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str | None):
        arguments = charged_arguments(arguments or "", charge)
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}.function.arguments must be JSON text, or a JSON object", field="messages"
        )
    named = {"name": function["name"], "arguments": arguments}
    return {**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": named}


def _function_of(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the call of the function in place of a custom tool."""
    custom = call.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        raise RequestError(
            f"{where}.custom must have the tool's name and its input, a text", field="messages"
        )
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}
