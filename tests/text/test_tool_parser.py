"""Tool calls are parsed wherever the text is split, and streamed; anything else is content."""

import json
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.setting_types import ReasoningFormatName, ToolFormatName
from streamserve.text.reasoning import REASONING_FORMATS
from streamserve.text.reply_events import CallArguments, CallBegin, CallEnd, MergedEvents, TextDelta
from streamserve.text.tools.formats import FORMATS, REQUIRED, Format, find_format
from streamserve.text.tools.parser import ToolCallParser

TOOLS: dict[str, dict[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "note": {"type": "string"},
            "days": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"$ref": "#/$defs/count"},
            "any": {},
        },
        "$defs": {"count": {"type": "integer"}},
    },
    "f": {"type": "object"},
}
ARGUMENTS = {"city": 'New "York"', "days": [1, {"deep": "}"}], "note": "<tool_call> [TOOL_CALLS] ü \\"}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
LLAMA = CALL.replace('"arguments"', '"parameters"')
EMPTY = '{"arguments": {}, "name": "f"}'
PYTHON = """get_weather(city='New "York"', days=[1, {'deep': '}'}], note="<tool_call> [TOOL_CALLS] ü \\\\")"""
GEMMA = (
    'call:get_weather{city:<escape>New "York"<escape>,days:[1,{deep:<escape>}<escape>}],'
    "note:<escape><tool_call> [TOOL_CALLS] ü \\<escape>}"
)
XML = f"""<function=get_weather>
<parameter=city>
New "York"
</parameter>
<parameter=days>
[1, {{"deep": "}}"}}]
</parameter>
<parameter=note>
{ARGUMENTS["note"]}
</parameter>
</function>"""

Parsed = tuple[str, list[tuple[str | None, str]]]


def read(format: Format, pieces: list[str], parallel: bool = True, named: str | None = None) -> Parsed:
    """Return the content, and the calls' names and arguments. The events of each call must be adjacent and in
    order."""
    reader, merged, content = ToolCallParser(format, TOOLS, parallel, named), MergedEvents(), ""
    for events in [*map(reader.feed, pieces), reader.finish()]:
        merged.add(events)
    calls: list[tuple[CallBegin, str]] = []
    last: object = None
    for event in merged:
        if isinstance(event, TextDelta):
            content += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event, ""))
        elif isinstance(event, CallArguments):
            assert last is calls[event.index][0]
            calls[-1] = calls[-1][0], event.text
        else:
            assert isinstance(event, CallEnd)
            assert isinstance(last, CallArguments)
            assert event.index == last.index
        last = event
    assert len({begin.id for begin, _ in calls}) == len(calls)
    return content, [(begin.name, text) for begin, text in calls]


def call(name: str = "get_weather", arguments: object = ARGUMENTS) -> tuple[str, str]:
    return name, json.dumps(arguments, ensure_ascii=False)


CASES: list[tuple[str, str, Parsed]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", [call()])),
    (
        "hermes",
        f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{EMPTY}</tool_call>\n",
        ("Let me see.", [call(), call("f", {})]),
    ),
    ("hermes", f"<tool_call>{EMPTY}</tool_call>\nDone.", ("\nDone.", [call("f", {})])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [call("f", {})])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [call("f", {"a": 1})]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call> ', None),  # type: ignore[list-item]
    ("hermes", "if a < b: <tool_call> is how\n", None),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "f', None),  # type: ignore[list-item]
    ("hermes", " <tool", None),  # type: ignore[list-item]
    ("llama3_json", LLAMA, ("", [call()])),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {EMPTY}", ("", [call(), call("f", {})])),
    ("llama3_json", f"Wait. <|python_tag|>{LLAMA}", ("Wait.", [call()])),
    ("llama3_json", '{"name": "Bob", "age": 3}', None),  # type: ignore[list-item]
    ("llama3_json", '{"answer": 42}\n', None),  # type: ignore[list-item]
    ("llama3_json", "Hello ; world", None),  # type: ignore[list-item]
    ("mistral", f"[TOOL_CALLS] [{CALL}, {EMPTY}]", ("", [call(), call("f", {})])),
    ("mistral", f"Ok [TOOL_CALLS][{CALL}]", ("Ok", [call()])),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{call()[1]}[TOOL_CALLS]f{{}}",
        ("", [call(), call("f", {})]),
    ),
    ("mistral", "[TOOL_CALLS]f is a tool", None),  # type: ignore[list-item]
    ("mistral", "[1, 2, 3]", None),  # type: ignore[list-item]
    ("mistral", '[TOOL_CALLS]g[ARGS]{"a": 1}', None),  # type: ignore[list-item]
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]f[ARGS]{}", ("", [call("f", {})] * 2)),
    ("granite", f"See:\n<|tool_call|>[{CALL}, {EMPTY}]", ("See:", [call(), call("f", {})])),
    ("granite", f"<tool_call>[{EMPTY}] Done", ("Done", [call("f", {})])),
    ("granite", '<|tool_call|>[{"name": "g"}]', None),  # type: ignore[list-item]
    ("phi4_mini", f"functools[{EMPTY},{CALL}]", ("", [call("f", {}), call()])),
    ("phi4_mini", f"<|tool_call|>[{CALL}]<|/tool_call|> Done", (" Done", [call()])),
    ("phi4_mini", "Python has functools[1] and tools", None),  # type: ignore[list-item]
    (
        "qwen3_coder",
        f"Hi.\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>\nBye",
        ("Hi.\nBye", [call(), call("f", {})]),
    ),
    ("qwen3_coder", f"{XML}\n</tool_call> Done", (" Done", [call()])),
    ("qwen3_coder", "<tool_call><function=g></function></tool_call>", None),  # type: ignore[list-item]
    ("qwen3_coder", "call <function= or <function=f x>", None),  # type: ignore[list-item]
    ("qwen3_coder", "<function=f><parameter=a>x\n\n</para", ("", [("f", '{"a": "x\\n\\n</para"}')])),
    ("pythonic", f"[{PYTHON}, f()]", ("", [call(), call("f", {})])),
    ("pythonic", "[f(a=1,)]", ("", [call("f", {"a": 1})])),
    ("pythonic", "f(a=1) is how to call it", None),  # type: ignore[list-item]
    ("pythonic", "[f(1), f(x)]", None),  # type: ignore[list-item]
    ("pythonic", "[g(a=1)]", None),  # type: ignore[list-item]
    ("pythonic", "[1, 2, 3]", None),  # type: ignore[list-item]
    ("pythonic", "[f(a=1, b=x + 1)] is odd", ("is odd", [call("f", {"a": 1, "b": "x + 1"})])),
    ("gemma", f"```tool_code\n{PYTHON}\n```\nDone", ("\nDone", [call()])),
    ("gemma", f"```json\n{LLAMA}\n```", ("", [call()])),
    ("gemma", f"[{PYTHON}]", ("", [call()])),
    ("gemma", LLAMA, ("", [call()])),
    ("gemma", 'So:\n```json\n{"a": [1]}\n```\nok', None),  # type: ignore[list-item]
    (
        "functiongemma",
        f"Ok<start_function_call>{GEMMA}<end_function_call><start_function_call>call:f{{}}<end_function_call>",
        ("Ok", [call(), call("f", {})]),
    ),
    ("functiongemma", "<start_function_call>call:g{a:1}<end_function_call>", None),  # type: ignore[list-item]
    ("functiongemma", "<start_function_call>call:f{1", None),  # type: ignore[list-item]
    (
        "olmo3",
        f"Ok <function_calls>\n{PYTHON}\nf()\n</function_calls>\nDone",
        ("Ok\nDone", [call(), call("f", {})]),
    ),
    ("olmo3", "<function_calls>\nprint(f(a=1))\n</function_calls>", None),  # type: ignore[list-item]
]
"""A format, a text, and the parsed calls; None: the text is content, without a call."""


@pytest.mark.parametrize(("name", "text", "parsed"), CASES)
def test_a_whole_text(name: str, text: str, parsed: Parsed | None) -> None:
    assert read(FORMATS[name], [text]) == (parsed or (text, []))


@given(st.sampled_from(CASES), st.data())
def test_every_split_gives_the_same(case: tuple[str, str, Parsed], data: st.DataObject) -> None:
    name, text, _ = case
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(FORMATS[name], pieces) == read(FORMATS[name], [text])


@given(
    st.sampled_from([*FORMATS.values(), REQUIRED]),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "<|python_tag|>",
                CALL,
                EMPTY,
                PYTHON,
                XML,
            ]
        )
        | st.sampled_from([mark for format in FORMATS.values() for mark in (*format.marks, *format.heads)])
        | st.sampled_from(
            [
                "{",
                "}",
                '"name"',
                '"f"',
                ":",
                ",",
                "[",
                "]",
                ";",
                " ",
                "\n",
                "x",
                "f",
                "\\",
                '"',
                "(",
                ")",
                "'",
            ]
        )
        | st.sampled_from(
            ["f(", "a=", "1", "call:f{", "a:", "function=f>", "<parameter=a>", "</parameter>", "</function>"]
        )
    ),
)
def test_any_text_is_parsed_the_same_character_by_character(format: Format, parts: list[str]) -> None:
    text = "".join(parts)
    whole = read(format, [text])
    assert read(format, list(text)) == whole
    for _, arguments in whole[1]:
        json.loads(arguments)
    if not whole[1] and format is not REQUIRED:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("name", "text", "parsed"),
    [case for case in CASES if case[2] and {"json", "named"}.issuperset(FORMATS[case[0]].syntaxes)],
)
def test_arguments_come_as_they_are_written(name: str, text: str, parsed: Parsed) -> None:
    """Arguments are streamed as they are generated: a character waits at most for the next one, a key for its
    end, and a mark in a value for the value's end."""
    text = text.replace(ARGUMENTS["note"].split(" ü")[0], "")  # type: ignore[attr-defined]
    parsed = read(FORMATS[name], [text])
    reader = ToolCallParser(FORMATS[name], TOOLS)
    outputs = [*(reader.feed(sign) for sign in text), reader.finish()]
    pieces = [event for output in outputs for event in output if isinstance(event, CallArguments)]
    for index, (_, arguments) in enumerate(parsed[1]):
        own = [piece.text for piece in pieces if piece.index == index]
        assert "".join(own) == arguments
        if len(arguments) > 10 and '"arguments": "' not in text:
            assert max(map(len, own)) <= len('}], "note": "')


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("qwen3_coder", XML, ['{"city": "', "N", "e", "w", " ", '\\"']),
        ("pythonic", f"[{PYTHON}]", ['{"city": ', '"N', "e", "w", " ", '\\"']),
        ("functiongemma", f"<start_function_call>{GEMMA}", ['{"city": ', '"', "N", "e", "w", " ", '\\"']),
    ],
)
def test_strings_are_streamed_in_other_syntaxes(name: str, text: str, pieces: list[str]) -> None:
    reader = ToolCallParser(FORMATS[name], TOOLS)
    events = [event for sign in text for event in reader.feed(sign)]
    deltas = [event.text for event in events if isinstance(event, CallArguments)]
    written = ["".join(deltas)[: len("".join(pieces))], deltas]
    assert written[0] == "".join(pieces)
    assert {"e", "w", '\\"', "Y"} <= set(deltas)


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("city", "12", "12"),
        ("city", "\n  a\n\n", "  a\n"),
        ("unit", "null", None),
        ("unit", "kelvin", "kelvin"),
        ("count", "-3", -3),
        ("count", "three", "three"),
        ("any", "True", True),
        ("any", "{'a': None}", {"a": None}),
        ("any", "a < b", "a < b"),
        ("days", "['Mo', 2]", ["Mo", 2]),
        ("unknown", "3", "3"),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(key: str, value: str, parsed: object) -> None:
    text = f"<function=get_weather><parameter={key}>{value}</parameter></function>"
    ((_, arguments),) = read(FORMATS["qwen3_coder"], [text])[1]
    assert json.loads(arguments) == {key: parsed}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), JSON, max_size=4))
def test_python_and_json_literals_become_the_same_json(arguments: dict[str, object]) -> None:
    for write in (repr, json.dumps):
        text = ", ".join(f"{key}={write(value)}" for key, value in arguments.items())
        ((_, parsed),) = read(FORMATS["pythonic"], [f"[f({text})]"])[1]
        assert json.loads(parsed) == arguments
        assert read(FORMATS["pythonic"], list(f"[f({text})]")) == ("", [("f", parsed)])


@given(st.text(), st.sampled_from([case for case in CASES if case[2]]))
def test_text_before_a_call_is_kept(before: str, case: tuple[str, str, Parsed]) -> None:
    name, text, (content, calls) = case
    format = FORMATS[name]
    if calls and text.startswith(format.openings) and not any(sign in before for sign in "<[`{f"):
        assert read(format, [f"{before}.{text}"]) == (f"{before}.{content}", calls)


def test_only_one_call_without_parallel_calls() -> None:
    text = f"<tool_call>{EMPTY}</tool_call><tool_call>{CALL}</tool_call>"
    assert read(FORMATS["hermes"], [text], parallel=False) == ("", [call("f", {})])


def test_calls_that_a_grammar_makes() -> None:
    text = f"[{EMPTY},\n {LLAMA}]"
    assert read(REQUIRED, list(text)) == ("", [call("f", {}), call()])
    assert read(REQUIRED, list(call()[1]), named="get_weather") == ("", [call()])


@pytest.mark.parametrize("text", ["", " [", '[{"na', '[{"name": "get_w', "x", f"[{EMPTY}, {{"])
@pytest.mark.parametrize("named", [None, "get_weather"])
def test_forced_calls_that_are_cut_short_leave_no_text(text: str, named: str | None) -> None:
    assert read(REQUIRED, list(text), named=named)[0] == ""


def test_ids_look_as_the_family_expects() -> None:
    def ids(name: str, text: str) -> Iterator[str]:
        events = ToolCallParser(FORMATS[name], TOOLS).feed(text)
        return (event.id for event in events if isinstance(event, CallBegin))

    assert [len(one) for one in ids("mistral", f"[TOOL_CALLS][{CALL}]")] == [9]
    assert all(one.startswith("call_") for one in ids("hermes", f"<tool_call>{CALL}"))


@pytest.mark.parametrize(
    ("name", "template", "found"),
    [
        ("auto", "{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("auto", "{{ tools }}[TOOL_CALLS]", "mistral"),
        ("auto", "{{ xml_tools }}<tool_call>", "hermes"),
        ("auto", "{{ tools }}<tool_call><function=f><parameter=a>", "qwen3_coder"),
        ("auto", "{{ tools }}<|start_of_role|><|tool_call|>", "granite"),
        ("auto", "{{ tools }}<|start_of_role|><tool_call>", "hermes"),
        ("auto", "{{ message['tools'] }}<|tool|>", "phi4_mini"),
        ("auto", "{{ tools }}functools[{}]", "phi4_mini"),
        ("auto", "{{ tools }}<start_of_turn>", "gemma"),
        ("auto", "{{ tools }}<start_of_turn><start_function_call>", "functiongemma"),
        ("auto", "{{ tools }}<|im_start|><function_calls>", "olmo3"),
        ("auto", "{{ tools }}<|start_header_id|>[func_name1(params", "pythonic"),
        ("auto", "{{ tools }}<|channel|>analysis<|message|>", "harmony"),
        ("auto", "{{ tools }}<|start_header_id|>", "llama3_json"),
        ("auto", "{{ tools }}", None),
        ("auto", "<|start_header_id|>", None),
        ("auto", None, None),
        ("none", "{{ tools }}<tool_call>", None),
        ("mistral", None, "mistral"),
    ],
)
def test_the_template_shows_the_format(name: str, template: str | None, found: str | None) -> None:
    assert find_format(name, template) is (FORMATS[found] if found else None)


def test_the_settings_have_all_formats() -> None:
    assert set(get_args(ToolFormatName)) == {"auto", "none", *FORMATS}
    assert set(get_args(ReasoningFormatName)) == {"auto", "none", *REASONING_FORMATS}
