"""A chat's tools: their validation, and grammars for calls that are forced or strict."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.custom_tools import custom_function
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.structured import response_schema
from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar, check_grammar, check_size
from streamserve.text.json_schemas import enforceable
from streamserve.text.structured import json_grammar
from streamserve.text.tokenizer import Tokenizer
from streamserve.text.tools.custom_text import TextGrammar, WrittenText, in_json, in_tags
from streamserve.text.tools.formats import FORMATS, REQUIRED, Format, NotExpressible, find_format
from streamserve.text.tools.grammar import calls_schema, free_calls, one_text, required_calls
from streamserve.text.tools.parser import ToolCallParser

MAX_CALLS = 32
"""Maximum number of calls in one message that a grammar constrains."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")
_ANY = {"type": "object"}
"""The argument schema for a function that is not strict, if another function is."""
_NOT_ENFORCED = " (the model sees the grammar, but its output is not constrained)"


@dataclass(frozen=True)
class Tools:
    """How one request's tools are used.

    - `rendered`: the tools passed to the chat template.
    - `grammar`: forces a call, or constrains the format of calls and of a message without calls
      (response_format).
    - `named`: the forced function; its arguments are the whole output.
    - `constrained`: the schemas that the grammar was made of, by their paths in the request.
    - `custom`: the custom tools; to the model, they are functions with one parameter.
    - `texts`: the grammars of the inputs of custom tools, by their paths in the request.
    """

    rendered: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    format: Format
    parallel: bool
    grammar: Grammar | None = None
    named: str | None = None
    constrained: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    texts: Mapping[str, TextGrammar] = field(default_factory=dict)

    def reader(self) -> ToolCallParser:
        """Return a parser for one message."""
        return ToolCallParser(self.format, self.schemas, self.parallel, self.named)


def requested_tools(
    request: ChatRequest, parser: str, tokenizer: Tokenizer, thought: str, ignored: IgnoredFields
) -> Tools | None:
    """Return the tools of `request`; None if it has none or must not use them.

    `parser` is the name of the model's tool call format. `thought` is the opening tag of its reasoning, or
    "". Keywords of schemas that are not strict, and that no grammar enforces, are added to `ignored`. Raises
    RequestError naming the field at fault.
    """
    functions, grammars = _functions(request.tools)
    schemas = _schemas(request.tools, functions)
    choice, allowed = _choice(request.tool_choice, schemas)
    if choice == "none" or not schemas:
        return None
    names = dict(enumerate(schemas))
    usable = {name: schema for name, schema in schemas.items() if name in allowed}
    tools = Tools(
        rendered=[tool for tool in functions if tool["function"]["name"] in allowed],
        schemas=usable,
        format=REQUIRED,
        parallel=request.parallel_tool_calls is not False and choice in ("auto", "required"),
        custom=frozenset(
            names[index] for index, tool in enumerate(request.tools) if tool["type"] == "custom"
        ),
        texts={f"tools[{index}].custom.format.grammar": grammar for index, grammar in grammars.items()},
    )
    chosen = {"auto": set(usable), "required": set(usable)}.get(choice, {choice})
    texts = {names[index]: grammar for index, grammar in grammars.items() if names[index] in chosen}
    if choice == "auto":
        format = _format(parser, tokenizer)
        strict = {tool["function"]["name"] for tool in tools.rendered if tool["function"].get("strict")}
        constrained = _constrained(functions, schemas, strict, ignored)
        tools = replace(tools, format=format, constrained=_paths(schemas, constrained))
        answer = None
        if request.response_format is not None:
            answer = response_schema(request.response_format, ignored)
        written = _written(texts, format, ignored)
        if not (strict or written) and answer is None:
            return tools
        followed = {**dict.fromkeys(usable, _ANY), **constrained}
        check_schemas(followed if answer is None else {**followed, "": answer})
        grammar = _free_calls(format, followed, tokenizer, thought, answer, written)
        return replace(tools, grammar=grammar)
    written = _written(texts, REQUIRED, ignored)
    constrained = _constrained(functions, schemas, chosen - written.keys(), ignored)
    tools = replace(tools, constrained=_paths(schemas, constrained))
    if choice == "required":
        return replace(tools, grammar=_required(constrained, written, MAX_CALLS if tools.parallel else 1))
    grammar = one_text(written[choice]) if written else json_grammar(constrained[choice], "tools")
    return replace(tools, grammar=grammar, named=choice)


def _format(parser: str, tokenizer: Tokenizer) -> Format:
    """Return the model's own format of calls. Raises RequestError if it is not known."""
    format = find_format(parser, tokenizer.template_signs)
    if format is None:
        raise RequestError(
            "tools: this model's tool call format is not known, as its chat template does not show it: use "
            "tool_choice required or a named function, or start the server with --tool-parser",
            field="tools",
        )
    return format


def _required(
    schemas: dict[str, dict[str, Any]], texts: Mapping[str, WrittenText], max_calls: int
) -> Grammar:
    """Return the grammar of a JSON list of calls."""
    if texts:
        return required_calls(schemas, texts, "parameters", max_calls)
    call = calls_schema(schemas, "parameters")
    definitions = call.pop("$defs")
    calls = {"type": "array", "items": call, "minItems": 1, "maxItems": max_calls, "$defs": definitions}
    return json_grammar(calls, "tools")


def _written(
    texts: Mapping[str, TextGrammar], format: Format, ignored: IgnoredFields
) -> dict[str, WrittenText]:
    """Return the grammars of the inputs of custom tools in the form of calls in `format`. Those without such
    a form are added to `ignored`."""
    written: dict[str, WrittenText] = {}
    tagged = "xml" in format.syntaxes
    for index, (name, grammar) in enumerate(texts.items()):
        try:
            if not (format.calls or format is REQUIRED):
                raise NotExpressible("calls in this model's format cannot be constrained")
            check_grammar(Grammar(kind="lark", text=grammar.lark))
            written[name] = (in_tags if tagged else in_json)(f"text{index}", grammar)
        except NotExpressible:
            ignored.add("tools[].format", _NOT_ENFORCED)
        except ValueError:
            continue  # the grammar is refused when all are checked
    return written


def _functions(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, TextGrammar]]:
    """Return `tools` with functions in place of custom tools, and the grammars of their inputs by index."""
    functions: list[dict[str, Any]] = []
    grammars: dict[int, TextGrammar] = {}
    for index, tool in enumerate(tools):
        if tool.get("type") == "custom" and isinstance(tool.get("custom"), dict):
            tool, grammar = custom_function(tool["custom"], f"tools[{index}].custom")
            if grammar is not None:
                grammars[index] = grammar
        functions.append(tool)
    return functions, grammars


def _constrained(
    tools: list[dict[str, Any]],
    schemas: dict[str, dict[str, Any]],
    names: set[str],
    ignored: IgnoredFields,
) -> dict[str, dict[str, Any]]:
    """Return the schemas of the functions with these `names` as a grammar can follow them."""
    check_schemas({name: schemas[name] for name in names})
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict")}
    return {
        name: enforceable(schema, _path(index), name in strict, ignored)
        for index, (name, schema) in enumerate(schemas.items())
        if name in names
    }


def _path(index: int) -> str:
    return f"tools[{index}].function.parameters"


def _paths(
    schemas: dict[str, dict[str, Any]], constrained: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the constrained schemas by their paths in the request."""
    numbers = {name: index for index, name in enumerate(schemas)}
    return {_path(numbers[name]): schema for name, schema in constrained.items()}


def _free_calls(
    format: Format,
    schemas: dict[str, dict[str, Any]],
    tokenizer: Tokenizer,
    thought: str,
    answer: dict[str, Any] | None,
    texts: Mapping[str, WrittenText],
) -> Grammar:
    """Return the grammar from `free_calls`. Raises RequestError for a schema that calls in this format cannot
    follow."""
    try:
        return free_calls(format, schemas, tokenizer.special_id, thought, answer, texts)
    except NotExpressible as error:
        remedy = "" if format is FORMATS["harmony"] else "; use tool_choice required"
        raise RequestError(f"tools: {error}{remedy}", field="tools") from error


def check_schemas(schemas: dict[str, dict[str, Any]]) -> None:
    """Raise RequestError if the schemas of all functions are too large for one grammar."""
    try:
        check_size(schemas)
    except ValueError as error:
        raise RequestError(f"tools: the schema of all calls {error}", field="tools") from error


def _schemas(tools: list[dict[str, Any]], functions: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the parameter schema of each function by name. `tools` are the tools that the client sent."""
    schemas: dict[str, dict[str, Any]] = {}
    for index, (tool, given) in enumerate(zip(functions, tools, strict=True)):
        where = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(
                f"{where} must have the type function, and a function; or the type custom, and a custom tool",
                field="tools",
            )
        name, named = function.get("name"), f"{where}.{given['type']}.name"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"{named} must have 1 to 128 letters, digits and _.:/-", field="tools")
        if name in schemas:
            raise RequestError(f"{named}: there are two tools called {name}", field="tools")
        if not isinstance(function.get("strict"), bool | None):
            raise RequestError(f"{where}.function.strict must be true or false", field="tools")
        schemas[name] = _parameters(function.get("parameters"), f"{where}.function.parameters")
    return schemas


def _parameters(schema: Any, where: str) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(f"{where} must be a JSON schema of type object", field="tools")
    return {"type": "object", **schema}


def _choice(choice: Any, schemas: dict[str, dict[str, Any]]) -> tuple[str, set[str]]:
    """Return none, auto, required, or a function's name; and the names of the functions that the model may
    call."""
    names = set(schemas)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, names = _allowed(choice.get("allowed_tools"), schemas)
    if choice is None:
        return "auto", names
    if isinstance(choice, dict):
        return _named(choice, schemas), names
    if choice not in _CHOICES:
        _refuse_choice(f" must be one of {', '.join(_CHOICES)}, or name a function")
    if choice == "required" and not schemas:
        _refuse_choice(" is required, but there are no tools")
    return str(choice), names


def _allowed(settings: Any, schemas: dict[str, dict[str, Any]]) -> tuple[str, set[str]]:
    """Return the mode and the functions of a tool_choice of the type allowed_tools."""
    given = settings if isinstance(settings, dict) else {}
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        _refuse_choice(": allowed_tools must have the mode auto or required, and a list of tools")
    return str(mode), {_named(tool, schemas) for tool in tools}


def _named(choice: Any, schemas: dict[str, dict[str, Any]]) -> str:
    """Return the name of the function or custom tool that a tool_choice, or one of its tools, names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    tool = choice.get(kind) if kind in ("function", "custom") else None
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        _refuse_choice(f" must name a function, or be one of {', '.join(_CHOICES)}")
    if name not in schemas:
        _refuse_choice(f": there is no tool called {name!r}")
    return name


def _refuse_choice(problem: str) -> NoReturn:
    raise RequestError(f"tool_choice{problem}", field="tool_choice")
