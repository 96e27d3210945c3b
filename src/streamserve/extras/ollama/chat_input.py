"""Convert a request of /api/chat or /api/generate to the equivalent chat request."""

import re
from typing import Any, NoReturn

from streamserve.api.http.body import checked
from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.open_calls import OpenCalls
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.thinking import checked_effort
from streamserve.extras.ollama.other_fields import OPTION_NAMES, OTHER_OPTIONS
from streamserve.extras.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
)
from streamserve.protocol.errors import RequestError

_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_FIELDS = {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}
_NOW = re.compile(r"0+(\.0+)?(ms|s|m|h)?")
"""A keep_alive that asks to unload a model at once."""


def checked_keep_alive(body: OllamaRequest, empty: bool, ignored: IgnoredFields) -> None:
    """Add `keep_alive`, if it is set, to `ignored`. Raises RequestError if an `empty` request, which has no
    messages or prompt, asks to unload the model."""
    if body.keep_alive is None:
        return
    if empty and _NOW.fullmatch(str(body.keep_alive)):
        _refuse(
            "keep_alive: 0 asks to unload the model: POST /admin/unload does that, with an admin key. Idle "
            "models are unloaded when another one needs their memory, or after --idle-unload",
            "keep_alive",
        )
    ignored.add("keep_alive")


def as_chat(body: OllamaChatRequest, model: str, ignored: IgnoredFields) -> ChatRequest:
    """Convert a request of /api/chat for the served name `model`; fields without effect are added to
    `ignored`. Raises RequestError naming the field of Ollama's API."""
    messages = _messages(body.messages, ignored)
    continued = messages[-1]["role"] == "assistant"
    if continued and "tool_calls" in messages[-1]:
        _refuse("messages: the last one calls tools, so their results must follow it")
    return ChatRequest(
        **_common(body, model, ignored),
        messages=messages,
        tools=body.tools,
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def as_generation(body: OllamaGenerateRequest, model: str, ignored: IgnoredFields) -> ChatRequest:
    """Convert a request of /api/generate, as `as_chat` does: its prompt is a message of the user."""
    if body.raw and body.system:
        _refuse("system has no place in a raw prompt: write it into the prompt", "system")
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return ChatRequest(**_common(body, model, ignored), messages=messages)


def _common(body: OllamaRequest, model: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Return the fields of a chat request that do not depend on the route."""
    return {
        "model": model,
        "stream": body.stream,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "response_format": _response_format(body.format),
        **_thinking(body.think),
        **_options(body.options or {}, ignored),
    }


def _options(given: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """Return the fields of a chat request that `options` set. Raises RequestError naming the option."""
    try:
        options = checked(given, OllamaOptions, OTHER_OPTIONS, ignored)
    except RequestError as error:
        raise RequestError(f"options.{error.message}", field="options") from error
    fields = {field: getattr(options, option) for field, option in OPTION_NAMES.items()}
    if options.num_predict is not None and options.num_predict <= 0:
        fields["max_completion_tokens"] = None
    if options.seed == -1:
        fields["seed"] = None
    return fields


def _response_format(format: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(format, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": format}}
    if format not in (None, "", "json"):
        _refuse(f"format must be json or a JSON schema, not {format!r}", "format")
    return {"type": "json_object"} if format else None


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        return {"reasoning_effort": checked_effort(think or None, "think")}
    return {"enable_thinking": think}


def _messages(messages: list[dict[str, Any]], ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Convert the turns. Ollama's calls and results may have no ids: results then belong to calls in their
    order."""
    chat: list[dict[str, Any]] = []
    calls = OpenCalls()
    ids = (f"call{number:05d}" for number in range(10**5))
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        converted = _message(message, where, ignored)
        for call in converted.get("tool_calls", ()):
            call.setdefault("id", next(ids))
            calls.add(call["id"], call["function"]["name"])
        if converted["role"] == "tool" and "tool_call_id" not in converted:
            # A result without an id answers the first open call of its function, or the first open call.
            converted["tool_call_id"] = calls.first(converted.get("name")) or calls.first() or next(ids)
        if "tool_call_id" in converted:
            calls.close(converted["tool_call_id"])
        chat.append(converted)
    return chat


def _message(message: dict[str, Any], where: str, ignored: IgnoredFields) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        _refuse(f"{where}.role must be one of {', '.join(_ROLES)}")
    if message.get("images"):
        _refuse(f"{where}.images is not supported: this server reads text only, so leave it out")
    for name in message.keys() - _MESSAGE_FIELDS:
        ignored.add_unknown(f"messages[].{name}", _MESSAGE_FIELDS)
    content = message.get("content")
    if not isinstance(content, str | None):
        _refuse(f"{where}.content must be a string")
    converted: dict[str, Any] = {"role": role, "content": content or ""}
    for name, field in (
        ("thinking", "reasoning_content"),
        ("tool_name", "name"),
        ("tool_call_id", "tool_call_id"),
    ):
        if not isinstance(message.get(name), str | None):
            _refuse(f"{where}.{name} must be a string")
        if message.get(name):
            converted[field] = message[name]
    if message.get("tool_calls"):
        converted["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return converted


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        _refuse(f"{where} must be a list")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where} must have a function with a name")
    if not isinstance(call.get("id"), str | None):
        _refuse(f"{where}.id must be a string")
    named = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return {**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": named}


def _refuse(message: str, field: str = "messages") -> NoReturn:
    raise RequestError(message, field=field)
