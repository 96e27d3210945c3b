"""Limits on grammars are checked before the library that would overflow reads them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from streamserve.protocol.grammar import (
    MAX_GROUPS,
    MAX_OPERATORS,
    MAX_SCHEMA_DEPTH,
    Grammar,
    GrammarKind,
    check_grammar,
    readable_error,
    to_llguidance,
)


def of(kind: GrammarKind, text: Any) -> Grammar:
    return Grammar(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chained(links: int) -> dict[str, Any]:
    links_by_name: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**links_by_name, f"d{links}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        (of("json", {"pattern": "x" * 70_000}), "at most 65536"),
        (of("json", "{"), "is not JSON"),
        (of("json", "[" * 60_000), "is nested too deeply"),
        (of("json", [1]), "must be a JSON Schema"),
        (of("json", False), "must be a JSON Schema"),
        (of("json", nested(130)), f"at most {MAX_SCHEMA_DEPTH}"),
        (of("json", chained(70)), f"at most {MAX_SCHEMA_DEPTH}"),
        (of("json", chained(1200)), f"deeper than {MAX_SCHEMA_DEPTH}"),
        (of("json", {"$ref": "http://example.com/x.json"}), "must begin with #/"),
        (of("json", {"$ref": "#/$defs/gone"}), "does not exist in the schema"),
        (of("json", {"properties": {"a": {"$id": "http://x/", "$ref": "#"}}}), "$id inside"),
        (of("json", {"x-guidance": 5}), "x-guidance"),
        (of("choice", []), "non-empty"),
        (of("choice", ["a", 5]), "list of strings"),
        (of("choice", ["a"] * 1001), "at most 1000"),
        (of("regex", "(a|b)" * 1001), f"at most {MAX_OPERATORS}"),
        (of("json", {"type": "string", "pattern": "a?" * 2001}), f"at most {MAX_OPERATORS}"),
        (of("json", {"properties": {f"p{n}": {"pattern": "a?" * 201} for n in range(10)}}), "at most 2000"),
        (of("json", {"patternProperties": {"a?" * 2001: {}}}), f"at most {MAX_OPERATORS}"),
        (of("json", {"x-guidance": {"whitespace_pattern": "a?" * 2001}}), f"at most {MAX_OPERATORS}"),
        (of("lark", "start: /" + "a?" * 20_000 + "/"), f"at most {MAX_OPERATORS}"),
        (of("lark", "start: " + "|".join(["a"] * 2002) + '\na: "x"'), f"at most {MAX_OPERATORS}"),
        (of("regex", "a\0b"), "NUL character"),
        (
            of("lark", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(501))),
            f"at most {MAX_GROUPS}",
        ),
        (of("lark", 'start: %json {"type": "object"}'), "%json"),
    ],
)
def test_what_is_refused(grammar: Grammar, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("$", r"\$").replace("(", r"\(")):
        check_grammar(grammar)


def test_a_limit_can_be_lower() -> None:
    with pytest.raises(ValueError, match="at most 10 bytes are allowed"):
        check_grammar(of("regex", "x" * 11), max_bytes=10)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        nested(60),
        {"$ref": "#"},
        {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
        {"properties": {"$id": {"type": "string"}}, "$id": "http://x/"},
        {"$defs": {"a/b~c": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c"},
        {"anyOf": [{"type": "null"}], "items": {"$ref": "#/anyOf/0"}},
        {"description": "what?" * 3000},
    ],
)
def test_what_is_taken(schema: Any) -> None:
    check_grammar(of("json", schema))


def test_a_line_of_a_regex_stays_one() -> None:
    (part,) = json.loads(to_llguidance(of("regex", "a/b\\/c\n\\\\/")))["grammars"]
    assert part["lark_grammar"] == r"start: /a\/b\/c\n\\\//"


def test_blanks_are_bounded_unless_the_author_says_otherwise() -> None:
    def options(schema: Any) -> Any:
        return json.loads(to_llguidance(of("json", schema)))["grammars"][0]["json_schema"]["x-guidance"]

    assert options({"type": "object"}) == {"whitespace_pattern": r"( |\n {0,16})?"}
    assert options({"x-guidance": {"whitespace_flexible": False}}) == {"whitespace_flexible": False}


DEEPEST = """
import json, sys
from llguidance import LLMatcher, LLTokenizer
from streamserve.protocol.grammar import *
links, signs = {links}, {signs}
open, close = "(" * signs, ")" * signs
rules = "\\n".join(f'{name}{{n}}: {{open}} "x" {name}{{n + 1}} {{close}}' for n in range(links))
lark = Grammar(kind="lark", text=f'start: {name}0\\n{{rules}}\\n{name}{{links}}: "a"')
refs = {{f"d{{n}}": {{"allOf": [{{"$ref": f"#/$defs/d{{n + 1}}"}}]}} for n in range(30)}}
schema = {{"$ref": "#/$defs/d0", "$defs": {{**refs, "d30": {{"type": "integer"}}}}}}
for grammar in (lark, Grammar(kind="json", text=json.dumps(schema))):
    check_grammar(grammar)
    matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    matcher.compute_bitmask()
"""


@pytest.mark.parametrize(("links", "signs"), [(490, 0), (60, 7), (30, 15)])
@pytest.mark.parametrize("name", ["r", "R"])
def test_the_deepest_that_is_taken_does_not_overflow(links: int, signs: int, name: str) -> None:
    """The deepest accepted grammar does not overflow. The test uses a separate process, since an overflow
    would end it."""
    code = DEEPEST.format(links=links, signs=signs, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_errors_of_the_library_leave_out_the_parsers_state() -> None:
    assert readable_error("row is\n too large<state>lexer: 1000 items</state>") == "row is too large"
    assert readable_error("NoExtensionBias<state>x") == "no text fulfils it"
