"""Converts a response's tools to tools of a chat, and calls of them to calls of the response's tools.

Codex also sends namespaces, which are named groups of tools. It identifies the tool of a call by namespace
and name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.protocol.errors import RequestError

SKIPPED_TOOLS = frozenset(
    {
        "image_generation",
        "local_shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Built-in tools that are left out with a warning: the model may do without them."""


@dataclass(frozen=True)
class ToolOrigin:
    """The tool that the client defined, of which a function of the chat was made."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class ResponseTools:
    """The tools of one request.

    - `converted`: functions and custom tools in the form of chats.
    - `origins`: the client's tool of each of them, by the name in the chat.
    - `names`: where each of them is in the request, for errors.
    """

    converted: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, ToolOrigin] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> ToolOrigin:
        """Return the tool whose function is called `name`. Models may also call functions that are not
        defined."""
        return self.origins.get(name, ToolOrigin(name))


def response_tools(tools: Sequence[dict[str, Any]], ignored: IgnoredFields) -> ResponseTools:
    """Convert `tools` to tools of a chat. Tools that are left out are added to `ignored`. Raises RequestError
    naming the tool at fault."""
    result = ResponseTools()
    for path, tool, namespace, about in _flattened(tools, ignored):
        name = tool.get("name")
        kind = tool["type"]
        inner = _custom(tool) if kind == "custom" else _function(tool, ignored)
        if about:
            described = inner.get("description")
            inner["description"] = f"{about}\n\n{described}" if described else about
        if isinstance(name, str):
            inner["name"] = flat_name(namespace, name)
            result.origins[inner["name"]] = ToolOrigin(name, namespace, kind == "custom")
        where = f"tools[{len(result.converted)}].{kind}"
        if kind == "custom":
            result.names[f"{where}.format.grammar"] = f"{path}.format"
        result.names[where] = path
        result.converted.append({"type": kind, kind: inner})
    return result


def flat_name(namespace: str | None, name: str) -> str:
    """Return the function's name for a tool in a namespace: both in one name, as Codex joins them."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def chosen_tool(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Convert tool_choice to the form of chats. Raises RequestError for a type that is not supported."""
    if not isinstance(choice, dict):
        return choice
    return _allowed_tools(choice) if choice.get("type") == "allowed_tools" else _named_function(choice)


def _allowed_tools(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    """Convert the choice of some of the tools. The tools that are left out count as not called."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if isinstance(tools, list):
        given = [tool if isinstance(tool, dict) else {} for tool in tools]
        tools = [_named_function(tool) for tool in given if not _is_skipped(tool.get("type"))]
        if given and not tools and mode == "auto":
            return "none"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _named_function(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice of a function or a custom tool in the form of chats."""
    if choice.get("type") not in ("function", "custom"):
        raise RequestError(f"tool_choice: type {choice.get('type')!r} is not supported", field="tool_choice")
    name, namespace = choice.get("name"), choice.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = flat_name(namespace, name)
    return {"type": "function", "function": {"name": name}}


def _is_skipped(kind: Any) -> bool:
    return isinstance(kind, str) and kind in SKIPPED_TOOLS


def _flattened(
    tools: Sequence[dict[str, Any]], ignored: IgnoredFields
) -> Iterator[tuple[str, dict[str, Any], str | None, str]]:
    """Yield each function and custom tool: its path in the request, the tool, its namespace, and for the
    first tool of a namespace the namespace's description."""
    for index, tool in enumerate(tools):
        path, kind = f"tools[{index}]", tool.get("type")
        if kind in ("function", "custom"):
            yield path, tool, None, ""
        elif kind == "namespace":
            namespace, about = _named(tool, path)
            for number, inner in enumerate(tool["tools"]):
                where = f"{path}.tools[{number}]"
                if not isinstance(inner, dict) or inner.get("type") not in ("function", "custom"):
                    _refuse(f"{where} must have the type function or custom")
                yield where, inner, namespace, about if number == 0 else ""
        elif _is_skipped(kind):
            ignored.add(f"tools[{kind}]")
        else:
            _refuse(f"{path}: type {kind!r} is not supported, only function, custom and namespace are")


def _named(tool: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Return the name and the description of a namespace."""
    name, about = tool.get("name"), tool.get("description")
    if not isinstance(name, str) or not name:
        _refuse(f"{path}.name must be the namespace's name")
    if not isinstance(about, str | None):
        _refuse(f"{path}.description must be a string")
    if not isinstance(tool.get("tools"), list):
        _refuse(f"{path}.tools must be a list of tools")
    return name, about or ""


def _function(tool: Mapping[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    if tool.get("defer_loading"):
        ignored.add("tools[].defer_loading")
    others = ("type", "defer_loading")
    return {name: value for name, value in tool.items() if name not in others and value is not None}


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool in the form of chats, where the grammar is a part of the format."""
    inner = {name: tool[name] for name in ("name", "description", "format") if tool.get(name) is not None}
    format = inner.get("format")
    if isinstance(format, dict) and format.get("type") == "grammar":
        grammar = {name: format.get(name) for name in ("syntax", "definition")}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    return inner


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, field="tools")
