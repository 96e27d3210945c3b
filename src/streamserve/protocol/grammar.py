"""Grammars that constrain outputs: as given in requests, validated, and converted for the llguidance library.

The library's parsers recurse: chains of a few thousand rules or references overflow the stack and crash the
process. So depth is limited here, before the library is called, in the server and in the worker.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

GrammarKind = Literal["json", "regex", "choice", "lark", "lark_json"]

MAX_GRAMMAR_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 128
MAX_SCHEMA_NODES = 8192
MAX_GROUPS = 500
MAX_OPERATORS = 2000
MAX_CHOICES = 1000
BLANKS = r"( |\n {0,16})?"
"""Whitespace between two parts of a JSON text: a space, or a line break and some indentation. Models that may
write unlimited whitespace sometimes write nothing else."""

NO_TEXT = "no text fulfils it"
"""The error of a grammar that has come to a dead end."""

_OPERATORS = "([{*+?|"
_PATTERNS = ("pattern", "whitespace_pattern", "item_separator", "key_separator")
"""Fields of a schema, and of its x-guidance, that are regular expressions."""

_DIRECTIVE = re.compile(r"%\s*(json|lark)\b")


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form of an output. `text` is, by `kind`:

    - json: a JSON Schema.
    - regex: a regular expression in Rust's syntax.
    - choice: a JSON list of strings.
    - lark: a grammar in llguidance's dialect of Lark; its first rule is `start`.
    - lark_json: a grammar that refers to JSON Schemas, and to grammars in Lark, by name: {"lark": "start: …
      @call … @text …", "schemas": {"call": …}, "grammars": {"text": …}}.

    `after`: the text, or the special token, after which the grammar applies; the text before it is free (a
    model's reasoning). `opening`: the free part must begin with this; if it does not, the grammar applies at
    once.
    """

    kind: GrammarKind
    text: str
    after: str | int = ""
    opening: str | int = ""


def check_size(value: Any, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise ValueError, naming the limit, if parsed JSON is larger than `max_bytes` as text. Takes time in
    proportion to `max_bytes` at most."""
    left, parts = max_bytes, [value]
    while parts:
        part = parts.pop()
        left -= 2 + len(part) if isinstance(part, str | list | dict) else 1
        if left < 0:
            raise ValueError(f"is too large: at most {max_bytes} bytes are allowed")
        if isinstance(part, dict):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def check_grammar(grammar: Grammar, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise ValueError, naming the limit, if a grammar is too large or too deep to compile."""
    size = len(grammar.text)  # measured in characters first, so that an oversized text is not encoded
    if size <= max_bytes:
        size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise ValueError(f"has {size} bytes; at most {max_bytes} bytes are allowed")
    if "\0" in grammar.text:
        raise ValueError("contains a NUL character")
    if grammar.kind == "json":
        _check_schema(_loads(grammar.text))
    elif grammar.kind == "choice":
        _check_choices(_loads(grammar.text))
    elif grammar.kind == "regex":
        _check_operators(grammar.text)
    elif grammar.kind == "lark":
        _check_lark(grammar.text)
    elif grammar.kind == "lark_json":
        lark, schemas, grammars = _parts(grammar.text)
        for text in (lark, *grammars.values()):
            _check_lark(text)
        for schema in schemas.values():
            _check_schema(schema)


def to_llguidance(grammar: Grammar) -> str:
    """Return the library's JSON form of a grammar that `check_grammar` accepted."""
    body: dict[str, Any]
    named: list[dict[str, Any]] = []
    if grammar.kind == "json":
        body = {"json_schema": _with_blanks(_loads(grammar.text))}
    elif grammar.kind == "regex":
        body = {"lark_grammar": f"start: /{in_slashes(grammar.text)}/"}
    elif grammar.kind == "choice":
        body = {"lark_grammar": "start: " + " | ".join(map(_quoted, _loads(grammar.text)))}
    elif grammar.kind == "lark":
        body = {"lark_grammar": grammar.text}
    else:
        lark, schemas, grammars = _parts(grammar.text)
        body = {"lark_grammar": lark}
        named = [{"name": name, "json_schema": _with_blanks(schema)} for name, schema in schemas.items()]
        named += [{"name": name, "lark_grammar": text} for name, text in grammars.items()]
    if grammar.after == "":
        return json.dumps({"grammars": [body, *named]})
    head = {"lark_grammar": _head(grammar.after, grammar.opening)}
    return json.dumps({"grammars": [head, {"name": "body", **body}, *named]})


def readable_error(error: str) -> str:
    """Return an error of the library as one line, without the parser's state."""
    error, _, state = error.partition("<state>")
    if state and error.strip() == "NoExtensionBias":
        return NO_TEXT
    return " ".join(error.split())[:500]


def _head(after: str | int, opening: str | int) -> str:
    """Return the grammar of free text up to `after`, optional blank lines, then the body."""
    begin = "" if opening == "" else f"BLANKS {_mark(opening)} "
    end = f"TEXT {_mark(after)}" if isinstance(after, int) else "until"
    rules = [
        f"start: {'thought?' if opening != '' else 'thought'} BLANKS @body",
        f"thought: {begin}{end}",
        "BLANKS: /[ \\r\\n\\t]{0,4}/",
        "TEXT: /(.|\\n)*/",
    ]
    if isinstance(after, str):
        rules.append(f"until[lazy]: TEXT {_mark(after)}")
    return "\n".join(rules)


def _mark(mark: str | int) -> str:
    return f"<[{mark}]>" if isinstance(mark, int) else _quoted(mark)


def _parts(text: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the grammar, the named schemas and the named grammars of a `lark_json` text."""
    given = _loads(text)
    parsed = given if isinstance(given, dict) else {}
    lark, schemas, grammars = parsed.get("lark"), parsed.get("schemas"), parsed.get("grammars", {})
    if not isinstance(lark, str) or not isinstance(schemas, dict) or not isinstance(grammars, dict):
        raise ValueError("must be an object with lark (a grammar), schemas and grammars (objects)")
    if not all(isinstance(each, str) for each in grammars.values()):
        raise ValueError("must have texts as its grammars")
    return lark, schemas, grammars


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _quoted(text: str) -> str:
    """Return a Lark string literal: its escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def in_slashes(regex: str) -> str:
    """Return `regex` escaped for use between slashes, on one line."""
    names = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"\\[^\n\r]|[/\n\r]", lambda match: names.get(match[0], match[0]), regex)


def _with_blanks(schema: Any) -> Any:
    """Return `schema` with limited whitespace, unless it sets its whitespace itself."""
    if not isinstance(schema, dict):
        return {"allOf": [schema]}
    return {"x-guidance": {"whitespace_pattern": BLANKS}, **schema}


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("must be a non-empty list of strings")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"has {len(choices)} choices; at most {MAX_CHOICES} are allowed")


def _check_operators(*patterns: str) -> None:
    """Raise ValueError for too many operators: compile time grows with their square."""
    operators = sum(pattern.count(sign) for pattern in patterns for sign in _OPERATORS)
    if operators > MAX_OPERATORS:
        raise ValueError(f"has {operators} operators (( [ {{ * + ? |); at most {MAX_OPERATORS} are allowed")


def _check_lark(text: str) -> None:
    groups = sum(text.count(sign) for sign in ":([{~")
    if groups > MAX_GROUPS:
        raise ValueError(f"has {groups} rules and groups (: ( [ {{ ~); at most {MAX_GROUPS} are allowed")
    _check_operators(text)
    if match := _DIRECTIVE.search(text):
        raise ValueError(f"uses %{match[1]}, which is not allowed in a grammar")


def _check_schema(schema: Any) -> None:
    if schema is False or not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON Schema, an object, that allows at least one value")
    if isinstance(schema, dict) and not isinstance(schema.get("x-guidance", {}), dict):
        raise ValueError("has an x-guidance that is not an object")
    heights: dict[int, int] = {}
    try:
        height = _height(schema, schema, heights)
    except RecursionError as error:
        raise ValueError(f"is deeper than {MAX_SCHEMA_DEPTH} levels, references followed") from error
    if height > MAX_SCHEMA_DEPTH:
        raise ValueError(
            f"is {height} levels deep, references followed; at most {MAX_SCHEMA_DEPTH} are allowed"
        )
    _check_operators(*_patterns(schema))


def _patterns(node: Any) -> Iterator[str]:
    """Yield the regular expressions of a schema, whose depth `_height` has checked. Data in the schema with
    the name of such a field also counts."""
    if isinstance(node, dict):
        yield from (node[name] for name in _PATTERNS if isinstance(node.get(name), str))
        several = node.get("patternProperties")
        yield from several if isinstance(several, dict) else ()
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _patterns(child)


def _height(node: Any, schema: Any, heights: dict[int, int]) -> int:
    """Return the number of levels of `node` and below, following references. A cycle ends where it closes."""
    if not isinstance(node, dict | list):
        return 0
    if id(node) not in heights:
        heights[id(node)] = 0
        if len(heights) > MAX_SCHEMA_NODES:
            raise ValueError(f"has more than {MAX_SCHEMA_NODES} objects and lists, which is the limit")
        children = list(node.values()) if isinstance(node, dict) else node
        if isinstance(node, dict) and node is not schema and isinstance(node.get("$id"), str):
            raise ValueError("has a $id inside; references are followed within one schema only")
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            children = [*children, _target(node["$ref"], schema)]
        heights[id(node)] = 1 + max((_height(child, schema, heights) for child in children), default=0)
    return heights[id(node)]


def _target(reference: str, schema: Any) -> Any:
    """Return the target of a `$ref`."""
    head, _, path = reference.partition("#")
    if head or (path and not path.startswith("/")):
        raise ValueError(f"refers to {reference!r}; references must begin with #/")
    target = schema
    for part in path.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(name)] if isinstance(target, list) else target[name]
        except (LookupError, ValueError, TypeError) as error:
            raise ValueError(f"refers to {reference!r}, which does not exist in the schema") from error
    return target
