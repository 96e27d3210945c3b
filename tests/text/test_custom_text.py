"""The input of a custom tool follows its grammar in each call format, as the model writes it there."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from streamserve.protocol.grammar import Grammar, check_grammar, to_llguidance
from streamserve.text.reply_events import CallArguments
from streamserve.text.tools.custom_text import TextGrammar, in_json, in_tags, regex_grammar
from streamserve.text.tools.formats import FORMATS, NotExpressible
from streamserve.text.tools.grammar import free_calls, one_text, required_calls
from streamserve.text.tools.parser import ToolCallParser
from tests.text import patch_grammar

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SCHEMAS: dict[str, Any] = {"apply_patch": INPUT, "shell": {"type": "object"}}
PATCH = TextGrammar(patch_grammar.LARK)
LINES = TextGrammar("start: LINE (LF LINE)*\nLINE: /.+/\n%import common.LF")
SUM = TextGrammar('start: INT ("+" INT)*\n%import common (INT, WS)\n%ignore WS')
DATE = regex_grammar(r'^on "\d{4}"\n|never/$')


def allows(grammar: Grammar, text: str) -> bool:
    check_grammar(grammar)
    matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def call(text: str) -> str:
    return json.dumps({"name": "apply_patch", "arguments": {"input": text}}, ensure_ascii=False)


WRITTEN: dict[str, Callable[[str], str]] = {
    "hermes": lambda text: f"I edit.\n<tool_call>\n{call(text)}\n</tool_call>",
    "llama3_json": lambda text: call(text).replace('"arguments"', '"parameters"'),
    "mistral": lambda text: f"[TOOL_CALLS][{call(text)}]",
    "granite": lambda text: f"<|tool_call|>[{call(text)}]",
    "qwen3_coder": lambda text: (
        "I edit.\n<tool_call>\n<function=apply_patch>\n<parameter=input>\n"
        f"{text}\n</parameter>\n</function>\n</tool_call>"
    ),
    "pythonic": lambda text: f"[apply_patch(input={json.dumps(text, ensure_ascii=False)})]",
    "gemma": lambda text: f"[apply_patch(input={json.dumps(text, ensure_ascii=False)})]",
    "olmo3": lambda text: (
        f"<function_calls>apply_patch(input={json.dumps(text, ensure_ascii=False)})</function_calls>"
    ),
}


def free(format: str, grammar: TextGrammar) -> Grammar:
    """Return the grammar of a message in which the input of apply_patch follows `grammar`."""
    written = (in_tags if "xml" in FORMATS[format].syntaxes else in_json)("text0", grammar)
    return free_calls(FORMATS[format], SCHEMAS, lambda mark: None, texts={"apply_patch": written})


@pytest.mark.parametrize("format", WRITTEN)
def test_a_message_has_calls_whose_input_follows_the_grammar(format: str) -> None:
    form, write = FORMATS[format], WRITTEN[format]
    grammar = free(format, PATCH)
    for text in patch_grammar.GOOD:
        assert allows(grammar, write(text)), text
        parser = ToolCallParser(form, SCHEMAS)
        events = [*parser.feed(write(text)), *parser.finish()]
        arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert json.loads(arguments) == {"input": text}, "what the grammar allows is what the client gets"
    for text in patch_grammar.BAD:
        assert not allows(grammar, write(text)), text
    assert allows(grammar, "No change is needed.")


def test_other_functions_are_called_as_before() -> None:
    grammar = free("hermes", PATCH)
    shell = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
    assert allows(grammar, shell)
    assert allows(grammar, f"{shell}\n{WRITTEN['hermes'](patch_grammar.GOOD[0])[8:]}")
    assert not allows(grammar, shell.replace("shell", "bash"))
    assert not allows(grammar, shell.replace("apply_patch", "shell").replace("{", "[", 2))
    tags = free("qwen3_coder", PATCH)
    parameter = "<parameter=a>\nb\n</parameter>\n"
    assert allows(tags, f"<tool_call><function=shell>\n{parameter}</function></tool_call>")


def test_mistrals_names_come_before_the_arguments() -> None:
    grammar = free("mistral", PATCH)
    for text, fits in ((patch_grammar.GOOD[2], True), (patch_grammar.BAD[3], False)):
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        assert allows(grammar, f"[TOOL_CALLS]apply_patch[ARGS]{arguments}") is fits
    assert allows(grammar, '[TOOL_CALLS]shell[ARGS]{"a": 1}')


@pytest.mark.parametrize("several", [1, 3])
def test_required_calls_and_a_named_tool(several: int) -> None:
    text = in_json("text0", PATCH)
    grammar = required_calls({"shell": SCHEMAS["shell"]}, {"apply_patch": text}, "parameters", several)
    one, other = (
        call(patch_grammar.GOOD[3]).replace("arguments", "parameters"),
        '{"name":"shell","parameters":{}}',
    )
    assert allows(grammar, f"[{one}]")
    assert allows(grammar, f"[{other}, {one}]") is (several > 1)
    assert not allows(grammar, f"[{call(patch_grammar.BAD[3]).replace('arguments', 'parameters')}]")
    assert not allows(grammar, "[]")
    named = one_text(text)
    assert allows(named, json.dumps({"input": patch_grammar.GOOD[0]}))
    assert not allows(named, json.dumps({"input": patch_grammar.BAD[1]}))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (LINES, ["a", "<div>\n</p>\n<b>", "a\n</parameter"], ["", "a\n\nb", "a\n"]),
        (SUM, ["1 +\n\n 2", "1"], ["1 2", "a"]),
        (DATE, ['on "2026"\n', "never/"], ["never", 'on "2026"', "never/\n"]),
        (regex_grammar(r"(.|\n)*z"), ["z", "\n<z>\n\nz"], ["", "z\n"]),
    ],
)
def test_a_text_in_tags_ends_at_its_closing_tag(
    grammar: TextGrammar, good: list[str], bad: list[str]
) -> None:
    tags = free("qwen3_coder", grammar)
    json_form = one_text(in_json("t", grammar))
    for text in good:
        assert allows(tags, WRITTEN["qwen3_coder"](text)), text
        assert allows(json_form, json.dumps({"input": text})), text
    for text in bad:
        assert not allows(tags, WRITTEN["qwen3_coder"](text)), text
        assert not allows(json_form, json.dumps({"input": text})), text


@given(st.text('ab\n"\\<>/', max_size=12))
def test_every_input_of_a_regular_expression(text: str) -> None:
    grammar = regex_grammar(r'(?:[ab"<>]|\\|\n)*')
    fits = "/" not in text
    tags = free("qwen3_coder", grammar)
    assert allows(tags, WRITTEN["qwen3_coder"](text)) is fits
    assert allows(one_text(in_json("t", grammar)), json.dumps({"input": text})) is fits


def test_what_cannot_be_written_in_a_format_is_not_expressible() -> None:
    lines = TextGrammar(r"start: /(.|\n)*/")
    in_json("t", lines)
    with pytest.raises(NotExpressible, match="several line breaks"):
        in_tags("t", lines)
    with pytest.raises(NotExpressible, match="operator ~"):
        in_json("t", TextGrammar('start: A\nA: ~"a"'))
    with pytest.raises(NotExpressible, match="at most"):
        in_json("t", TextGrammar("start: " + " ".join(['/[^"]/'] * 400)))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("a/b", r"a\/b"), ("a\n", r"a\n"), ("", "")],
)
def test_a_regular_expression_matches_whole_texts(pattern: str, expected: str) -> None:
    assert regex_grammar(pattern).pattern == f"(?:{expected})"
