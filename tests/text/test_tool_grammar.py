"""Messages that a grammar lets a model write, where it may call functions whose arguments follow a schema."""

from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from streamserve.protocol.grammar import Grammar, check_grammar, to_llguidance
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.grammar import free_calls

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

WHOLE = [
    ("hermes", "It is warm. if a < b: <tool"),
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{FREE}</tool_call>\n"),
    ("llama3_json", 'It has {"braces": 1}.'),
    ("llama3_json", f"{LLAMA}; {LLAMA}"),
    ("llama3_json", f"<|python_tag|>{LLAMA}"),
    ("mistral", "It is warm [TOOL"),
    ("mistral", f"[TOOL_CALLS][{CALL}, {FREE}]"),
    ("mistral", f'See: [TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]any{{"a": 1}}'),
]
REFUSED = [  # the last sign is the first that is refused
    ("hermes", "<tool_call>s"),
    ("hermes", '<tool_call>{"name": "o'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "L'),
    ("hermes", f"<tool_call>{CALL}</tool_call>T"),
    ("llama3_json", "{x"),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "L'),
    ("mistral", '[TOOL_CALLS]weather{"city": "L'),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {}'),
]
THOUGHT = "<think>Shall I write <tool_call>, [TOOL_CALLS] or {?</think>\n\n"


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


def grammar(format: str, thinks: bool = False, answer: dict[str, Any] | None = None) -> Grammar:
    return free_calls(FORMATS[format], SCHEMAS, lambda sign: None, thinks, answer)


def accepted(spec: Grammar, text: str) -> tuple[int, bool]:
    """The number of bytes that the grammar accepts, and whether the text may end there."""
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
        *((format, '{"mood": "glad"}') for format in FORMATS),
    ],
)
def test_with_a_format_of_answers_a_message_is_calls_or_such_an_answer(format: str, text: str) -> None:
    assert accepted(grammar(format, answer=ANSWER), text) == (len(text), True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ["Hello", '{"mood": "s', '{"mood": "glad"}<'])
def test_with_a_format_of_answers_there_is_no_other_text(format: str, text: str) -> None:
    count, complete = accepted(grammar(format, answer=ANSWER), text)
    assert count < len(text)
    assert not complete or text.startswith('{"mood": "glad"}')


@pytest.mark.parametrize("format", FORMATS)
def test_reasoning_may_mention_calls(format: str) -> None:
    spec = msgspec.structs.replace(grammar(format, thinks=True), after="</think>", opening="<think>")
    for part, text in WHOLE:
        if part == format:
            assert accepted(spec, THOUGHT + text) == (len(THOUGHT + text), True)
            assert accepted(spec, text) == (len(text), True)
    for part, text in REFUSED:
        if part == format:
            assert accepted(spec, THOUGHT + text)[0] == len(THOUGHT + text) - 1


def test_special_tokens_open_calls() -> None:
    spec = free_calls(FORMATS["mistral"], SCHEMAS, {"[TOOL_CALLS]": 5, "[ARGS]": 6}.get, False)
    assert "opened: TEXT <[5]>" in spec.text
    assert "between: <[6]>? BLANKS" in spec.text
