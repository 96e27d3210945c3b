"""Custom tools, whose input is text: they are functions with one parameter to the model."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import check_size
from streamserve.text.lark import lark_tokens
from streamserve.text.surrogates import well_formed
from streamserve.text.tools.custom_text import INPUT, TextGrammar, regex_grammar


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


def custom_function(tool: Mapping[str, Any], where: str) -> tuple[dict[str, Any], TextGrammar | None]:
    """Return the function in place of a custom tool of a chat, and the grammar of its input. The function's
    description has the grammar. Raises RequestError naming the part of the tool at fault."""
    about, format = tool.get("description"), tool.get("format") or {"type": "text"}
    if not isinstance(about, str | None):
        _refuse(f"{where}.description must be a string")
    if not isinstance(format, dict) or format.get("type") not in ("text", "grammar"):
        _refuse(f"{where}.format must have a type: text or grammar")
    grammar = None
    if format["type"] == "grammar":
        grammar, rule = _grammar(format.get("grammar"), f"{where}.format.grammar")
        about = "\n\n".join(filter(None, (about, f"The {INPUT} must match this {rule}")))
    text = {"type": "string", "description": "the whole input of the tool, as text"}
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {"description": about} if about else {}
    function = {"name": tool.get("name"), **described, "parameters": parameters}
    return {"type": "function", "function": function}, grammar


def _grammar(settings: Any, where: str) -> tuple[TextGrammar, str]:
    """Return the grammar of a custom tool's input, and its kind and definition for the model."""
    given = settings if isinstance(settings, dict) else {}
    syntax, definition = given.get("syntax"), given.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        _refuse(f"{where} must have a syntax, lark or regex, and a definition")
    try:
        check_size(definition)
    except ValueError as error:
        raise RequestError(f"{where} {error}", field="tools") from error
    if syntax == "regex":
        return regex_grammar(definition), f"regular expression:\n{definition}"
    if any(token.kind in ("token", "reference") for token in lark_tokens(definition)):
        _refuse(f"{where}.definition must not refer to tokens or to other grammars")
    return TextGrammar(definition), f"grammar in Lark:\n{definition}"


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, field="tools")
