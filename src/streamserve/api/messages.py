"""The messages of a chat request, checked: what cannot be obeyed is refused by name."""

from collections.abc import Sequence
from typing import Any

from streamserve.protocol.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant")
_UNSUPPORTED_ROLES = ("tool", "function")
_FIELDS = ("role", "content", "name")
_UNSUPPORTED_FIELDS = (
    "annotations",
    "audio",
    "function_call",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_call_id",
    "tool_calls",
)


def checked_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the fields a template gets. Raises RequestError naming what it can't get.

    Fields that are null or empty are as good as absent: clients send replies back as they came.
    """
    return [_checked(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _checked(message: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in message.items():
        if name in _UNSUPPORTED_FIELDS and value not in (None, [], ""):
            raise RequestError(f"{where}.{name} is not supported", field="messages")
        if name not in _UNSUPPORTED_FIELDS and name not in _FIELDS:
            raise RequestError(f"{where}.{name} is not a known field", field="messages")
    role = message.get("role")
    if role in _UNSUPPORTED_ROLES:
        raise RequestError(f"{where}: role {role} is not supported", field="messages")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", field="messages")
    if message.get("content") is None:
        raise RequestError(f"{where}.content is required", field="messages")
    if not isinstance(message.get("name"), str | None):
        raise RequestError(f"{where}.name must be a string", field="messages")
    return {name: message[name] for name in _FIELDS if message.get(name) is not None}
