"""Grammars for messages that may call functions allow only arguments that follow the functions' schemas."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from streamserve.protocol.grammar import Grammar, check_grammar, to_llguidance
from streamserve.text.reply_events import CallArguments
from streamserve.text.tools.formats import FORMATS, NotExpressible
from streamserve.text.tools.grammar import free_calls
from streamserve.text.tools.parser import ToolCallParser

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
SCHEMAS = {"weather": WEATHER, "any": {"type": "object"}}
ROME = '{"city": "Rome"}'
CALL = f'{{"name": "weather", "arguments": {ROME}}}'
LLAMA = CALL.replace("arguments", "parameters")
FREE = '{"name": "any", "arguments": {"a": [1]}}'

PYTHON = 'weather(city="Rome")'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
ANY_XML = "<function=any>\n<parameter=a>\n1 < 2\n</parameter>\n<parameter=b>\n\n</parameter>\n</function>"

WHOLE = [
    ("granite", f"See <|tool_call|>[{CALL}, {FREE}]"),
    ("granite", "It is warm <|tool"),
    ("phi4_mini", f"<|tool_call|>[{CALL}]<|/tool_call|>"),
    ("phi4_mini", "It has functools."[:12]),
    ("qwen3_coder", f"Let me see.\n{XML}\n<tool_call>{ANY_XML}</tool_call>"),
    ("qwen3_coder", "if a < b: <tool"),
    ("pythonic", f'[{PYTHON}, any(a=[1], b={{"c": null}}), any()]'),
    ("pythonic", "Now (see [1])"),
    ("gemma", f"[{PYTHON}]"),
    ("gemma", f"Ok: ```tool_code\n[{PYTHON}]\n```"),
    ("olmo3", f"See: <function_calls>\n{PYTHON}\nany(a=1)\n</function_calls>"),
    ("hermes", "It is warm. if a < b: <tool"),
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{FREE}</tool_call>\n"),
    ("llama3_json", 'It has {"braces": 1}.'),
    ("llama3_json", f"{LLAMA}; {LLAMA}"),
    ("llama3_json", f"<|python_tag|>{LLAMA}"),
    ("mistral", "It is warm [TOOL"),
    ("mistral", f"[TOOL_CALLS][{CALL}, {FREE}]"),
    ("mistral", f'See: [TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]any{{"a": 1}}'),
]
REFUSED = [  # The last character is the first that is refused.
    ("hermes", "<tool_call>s"),
    ("hermes", '<tool_call>{"name": "o'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "L'),
    ("hermes", f"<tool_call>{CALL}</tool_call>T"),
    ("llama3_json", "{x"),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "L'),
    ("mistral", '[TOOL_CALLS]weather{"city": "L'),
    ("granite", '<|tool_call|>[{"name": "o'),
    ("granite", "<tool_call>"),
    ("phi4_mini", '<|tool_call|>[{"name": "weather", "arguments": {"city": "L'),
    ("phi4_mini", "Now functools"),
    ("qwen3_coder", "<tool_call><function=o"),
    ("qwen3_coder", "See <function="),
    ("qwen3_coder", "<tool_call><function=weather>\n</"),
    ("qwen3_coder", "<tool_call><function=weather>\n<parameter=city>\nL"),
    ("pythonic", "[o"),
    ("pythonic", "[weather()"),
    ("pythonic", '[weather(city="L'),
    ("olmo3", '<function_calls>\nweather(city="L'),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {}'),
]
THOUGHT = "<think>Shall I write <tool_call>, [TOOL_CALLS] or {?</think>\n\n"


CONSTRAINED = [name for name, format in FORMATS.items() if format.calls]

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


def grammar(format: str, thinks: bool = False, answer: dict[str, Any] | None = None) -> Grammar:
    return free_calls(FORMATS[format], SCHEMAS, lambda sign: None, "<think>" if thinks else "", answer)


def accepted(spec: Grammar, text: str) -> tuple[int, bool]:
    """Return the number of bytes that the grammar accepts, and whether the text may end there."""
    check_grammar(spec)
    matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(spec), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())), matcher.is_accepting()


@pytest.mark.parametrize(("format", "text"), WHOLE)
def test_text_and_calls_are_accepted(format: str, text: str) -> None:
    assert accepted(grammar(format), text) == (len(text), True)


@pytest.mark.parametrize(("format", "text"), REFUSED)
def test_calls_that_violate_the_schema_are_refused(format: str, text: str) -> None:
    assert accepted(grammar(format), text)[0] == len(text) - 1


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("llama3_json", LLAMA),
        ("llama3_json", f"<|python_tag|>{LLAMA}"),
        ("mistral", f"[TOOL_CALLS][{CALL}, {FREE}]"),
        *((format, '{"mood": "glad"}') for format in CONSTRAINED),
    ],
)
def test_with_a_format_of_answers_a_message_is_calls_or_such_an_answer(format: str, text: str) -> None:
    assert accepted(grammar(format, answer=ANSWER), text) == (len(text), True)


@pytest.mark.parametrize("format", CONSTRAINED)
@pytest.mark.parametrize("text", ["Hello", '{"mood": "s', '{"mood": "glad"}<'])
def test_with_a_format_of_answers_there_is_no_other_text(format: str, text: str) -> None:
    count, complete = accepted(grammar(format, answer=ANSWER), text)
    assert count < len(text)
    assert not complete or text.startswith('{"mood": "glad"}')


@pytest.mark.parametrize("format", CONSTRAINED)
def test_reasoning_may_mention_calls(format: str) -> None:
    spec = msgspec.structs.replace(grammar(format, thinks=True), after="</think>", opening="<think>")
    for part, text in WHOLE:
        if part == format:
            assert accepted(spec, THOUGHT + text) == (len(THOUGHT + text), True)
            assert accepted(spec, text) == (len(text), True)
    for part, text in REFUSED:
        if part == format:
            assert accepted(spec, THOUGHT + text)[0] == len(THOUGHT + text) - 1


OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}, "c": {"type": "string"}},
    "required": ["b"],
}
OPTIONALS = {
    "olmo3": ["f(b=null)", 'f(a=1, b="x")', 'f(b=null, c="y")', 'f(a=1, b=null, c="y")'],
    "qwen3_coder": [
        "<function=f>\n<parameter=b>\nnull\n</parameter>\n</function>",
        '<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"x"\n</parameter>\n</function>',
        "<function=f>\n<parameter=b>\nnull\n</parameter>\n<parameter=c>\ny\n</parameter>\n</function>",
    ],
}


@pytest.mark.parametrize(("format", "call"), [(name, call) for name in OPTIONALS for call in OPTIONALS[name]])
def test_arguments_that_are_not_required_may_be_left_out(format: str, call: str) -> None:
    spec = free_calls(FORMATS[format], {"f": OPTIONAL}, lambda sign: None)
    text = f"{FORMATS[format].openings[0]}{call}{FORMATS[format].closings[0]}"
    assert accepted(spec, text) == (len(text), True)
    events = ToolCallParser(FORMATS[format], {"f": OPTIONAL}).feed(text)
    arguments = json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))
    assert arguments.keys() <= OPTIONAL["properties"].keys()
    jsonschema.validate(arguments, OPTIONAL)


def test_required_arguments_may_not() -> None:
    spec = free_calls(FORMATS["olmo3"], {"f": OPTIONAL}, lambda sign: None)
    assert accepted(spec, "<function_calls>f(a=1)")[0] == len("<function_calls>f(a=1")
    assert accepted(spec, "<function_calls>f(a=1, c")[0] == len("<function_calls>f(a=1, ")


@pytest.mark.parametrize(
    ("format", "schema"),
    [
        ("functiongemma", {"type": "object"}),
        ("harmony", {"type": "object"}),
        ("olmo3", {"type": "object", "anyOf": [{}]}),
        ("olmo3", {"type": "object", "properties": {}, "required": ["a"]}),
        ("olmo3", {"type": "object", "additionalProperties": {"type": "string"}}),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}),
    ],
)
def test_what_a_syntax_cannot_follow_is_refused(format: str, schema: dict[str, Any]) -> None:
    with pytest.raises(NotExpressible):
        free_calls(FORMATS[format], {"f": schema}, lambda sign: None)


def test_special_tokens_open_calls() -> None:
    spec = free_calls(FORMATS["mistral"], SCHEMAS, {"[TOOL_CALLS]": 5, "[ARGS]": 6}.get)
    assert "opened: TEXT <[5]>" in spec.text
    assert "between: <[6]>? BLANKS" in spec.text
