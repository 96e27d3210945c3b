"""Converts a response's tools to functions of a chat, and calls of these functions to calls of the tools.

Chats have functions only. Codex also sends namespaces, which are named groups of tools, and custom tools,
whose input is text. It identifies the tool of a call by namespace and name.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.protocol.errors import RequestError
from streamserve.text.surrogates import well_formed

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

INPUT = "input"
"""The parameter of the function in place of a custom tool."""

_NOT_ENFORCED = " (the model sees the grammar in Lark, but only a regular expression constrains its output)"


@dataclass(frozen=True)
class ToolOrigin:
    """The tool that the client defined, of which a function of the chat was made."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class ResponseTools:
    """The tools of one request.

    - `functions`: in the form of chats.
    - `origins`: the tool of each function, by the function's name.
    - `names`: where each function is in the request, for errors.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, ToolOrigin] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> ToolOrigin:
        """Return the tool whose function is called `name`. Models may also call functions that are not
        defined."""
        return self.origins.get(name, ToolOrigin(name))


def response_tools(tools: Sequence[dict[str, Any]], ignored: IgnoredFields) -> ResponseTools:
    """Convert `tools` to functions. Tools that are left out are added to `ignored`. Raises RequestError
    naming the tool at fault."""
    converted = ResponseTools()
    for path, tool, namespace, about in _flattened(tools, ignored):
        name = tool.get("name")
        custom = tool["type"] == "custom"
        function = _custom(tool, path, ignored) if custom else _function(tool, ignored)
        if about:
            described = function.get("description")
            function["description"] = f"{about}\n\n{described}" if described else about
        if isinstance(name, str):
            function["name"] = flat_name(namespace, name)
            converted.origins[function["name"]] = ToolOrigin(name, namespace, custom)
        where = f"tools[{len(converted.functions)}].function"
        if custom:
            converted.names[f"{where}.parameters.properties.{INPUT}"] = f"{path}.format"
        converted.names[where] = path
        converted.functions.append({"type": "function", "function": function})
    return converted


def flat_name(namespace: str | None, name: str) -> str:
    """Return the function's name for a tool in a namespace: both in one name, as Codex joins them."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def custom_arguments(text: str) -> str:
    """Return the arguments of the function in place of a custom tool that was called with `text`."""
    return json.dumps({INPUT: text})


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments that the model wrote: the arguments themselves if
    they are not what the function declares."""
    try:
        text = json.loads(arguments)[INPUT]
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments
    return well_formed(text) if isinstance(text, str) else arguments


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


def _custom(tool: Mapping[str, Any], path: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Return a function with one parameter, the input's text. A grammar of the input is described; a regular
    expression is also a part of the schema, which is strict."""
    about, format = tool.get("description"), tool.get("format") or {"type": "text"}
    if not isinstance(about, str | None):
        _refuse(f"{path}.description must be a string")
    if not isinstance(format, dict) or format.get("type") not in ("text", "grammar"):
        _refuse(f"{path}.format must have a type: text or grammar")
    text = {"type": "string", "description": "the whole input of the tool, as text"}
    strict: dict[str, Any] = {}
    if format["type"] == "grammar":
        syntax, definition = format.get("syntax"), format.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            _refuse(f"{path}.format must have a syntax, lark or regex, and a definition")
        if syntax == "regex":
            text["pattern"], strict = f"^(?:{definition})$", {"strict": True}
        else:
            ignored.add("tools[].format", _NOT_ENFORCED)
        rule = "regular expression" if syntax == "regex" else "grammar in Lark"
        about = "\n\n".join(filter(None, (about, f"The {INPUT} must match this {rule}:\n{definition}")))
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {"description": about} if about else {}
    return {"name": tool.get("name"), **described, **strict, "parameters": parameters}


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, field="tools")
