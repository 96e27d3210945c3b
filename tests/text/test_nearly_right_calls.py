"""Calls whose marks are missing, doubled, or inside a value are recognized, and their arguments are JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.text.harmony import HarmonyParser
from streamserve.text.reply_events import CallArguments, CallBegin, MergedEvents, TextDelta
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.parser import ToolCallParser

TOOLS: dict[str, dict[str, object]] = {
    "say": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"allOf": [{"$ref": "#/$defs/count"}]},
            "any": {},
        },
        "$defs": {"count": {"type": "integer"}},
    },
    "add": {"type": "object", "properties": {"i": {"type": "integer"}}},
    "free": {"type": "object"},
}

Parsed = tuple[str, list[tuple[str, str]]]


def read(name: str, pieces: list[str], cut: bool = False) -> Parsed:
    """Return the content, and the names and arguments of the calls."""
    merged = MergedEvents()
    if name == "harmony":
        harmony = HarmonyParser(TOOLS)
        for events in [*(harmony.read(piece, False) for piece in pieces), harmony.read("", True, cut)]:
            merged.add(events)
    else:
        parser = ToolCallParser(FORMATS[name], TOOLS)
        for events in [*map(parser.feed, pieces), parser.finish(cut)]:
            merged.add(events)
    names = {event.index: event.name for event in merged if isinstance(event, CallBegin)}
    arguments = {event.index: event.text for event in merged if isinstance(event, CallArguments)}
    content = "".join(event.text for event in merged if isinstance(event, TextDelta))
    return content, [(called, arguments.get(index, "")) for index, called in names.items()]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"i": 42}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=say>\n<parameter=text>\nhello\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
GEMMA = "<start_function_call>call:say{text:<escape>hello<escape>,any:<escape>x<escape>}<end_function_call>"
HARMONY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"i": 42}<|call|>'
ADD = [("add", '{"i": 42}')]
SAY = [("say", '{"text": "hello", "count": 2}')]
SAID = [("say", '{"text": "hello", "any": "x"}')]

CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    # Closing marks are missing.
    ("hermes", HERMES.replace("}}", "}"), "", ADD),
    ("hermes", HERMES.replace("}}", ""), "", ADD),
    ("hermes", HERMES.replace("\n</tool_call>", "") + HERMES, "", ADD * 2),
    ("hermes", HERMES.replace("42}}", '"Rome}}') + HERMES, "", [("add", '{"i": "Rome"}'), *ADD]),
    ("qwen3_coder", CODER.replace("</parameter>\n", "", 1), "", SAY),
    ("qwen3_coder", CODER.replace("\n</parameter>\n</function>", "\n</function>"), "", SAY),
    ("qwen3_coder", CODER.replace("</function>\n", ""), "", SAY),
    ("qwen3_coder", CODER.replace("</tool_call>", "") + CODER, "", SAY * 2),
    ("qwen3_coder", CODER.replace("</parameter>\n", "").replace("</function>\n", ""), "", SAY),
    ("qwen3_coder", CODER.removesuffix("\n</parameter>\n</function>\n</tool_call>"), "", SAY),
    (
        "qwen3_coder",
        CODER.replace("say", "free").replace("</parameter>\n", "", 1),
        "",
        [("free", '{"text": "hello", "count": "2"}')],
    ),
    ("pythonic", "[say(text='hello', count=2, add(i=42)]", "", SAY + ADD),
    (
        "pythonic",
        "[say(text='hello', count=[2), add(i=42)",
        "",
        [("say", '{"text": "hello", "count": [2]}'), *ADD],
    ),
    ("olmo3", "<function_calls>\nadd(i=42\nadd(i=42)\n</function_calls>", "", ADD * 2),
    ("functiongemma", GEMMA.replace("}", ""), "", SAID),
    ("functiongemma", GEMMA.replace("<escape>,", ","), "", SAID),
    ("functiongemma", GEMMA.replace("<escape>}", "}"), "", SAID),
    ("functiongemma", GEMMA.replace("<escape>hello", "hello"), "", SAID),
    ("functiongemma", GEMMA.replace("<escape>,any:<escape>x<escape>", ",count:2"), "", SAY),
    (
        "functiongemma",
        GEMMA.replace("hello", "a,count:2"),
        "",
        [("say", '{"text": "a,count:2", "any": "x"}')],
    ),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"i": 42[TOOL_CALLS]add{"i": 42}', "", ADD * 2),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"i": 42}, {"name": "add", "parameters": {"i": 42',
        "",
        ADD * 2,
    ),
    ("harmony", HARMONY.replace("}", "") + HARMONY, "", ADD * 2),
    ("harmony", HARMONY.replace("<|call|>", "") + HARMONY, "", ADD * 2),
    ("harmony", HARMONY.replace("<|message|>", ""), "", ADD),
    # Opening marks are missing: the closing mark, or the separator after the name, shows that it is a call.
    ("hermes", HERMES.removeprefix("<tool_call>\n"), "", ADD),
    ("hermes", "Let me see.\n" + HERMES.removeprefix("<tool_call>\n") + HERMES[12:], "Let me see.", ADD * 2),
    ("hermes", 'So:\n{"name": "add", "arguments": {}}\nis a call.', None, []),
    ("hermes", '{"name": "add", "arguments": {}}', None, []),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", SAY),
    ("qwen3_coder", CODER.replace("<function=say>\n", ""), "", SAY),
    ("qwen3_coder", f"So. {CODER}\n" + CODER.replace("<function=say>\n", "") + CODER, "So.", SAY * 3),
    ("qwen3_coder", CODER.replace("<function=say>\n<parameter=text>", "<parameter=none>"), None, []),
    ("olmo3", "add(i=42)\n</function_calls>", "", ADD),
    ("functiongemma", GEMMA.removeprefix("<start_function_call>"), "", SAID),
    ("mistral", 'add[ARGS]{"i": 42}', "", ADD),
    ("mistral", "add[ARGS] is text", None, []),
    ("harmony", HARMONY.removeprefix("<|channel|>"), "", ADD),
    # Marks are doubled.
    ("hermes", HERMES.replace("}}", "}}}"), "", ADD),
    ("hermes", f"{HERMES}\n</tool_call>\nDone", "\nDone", ADD),
    ("hermes", f"<tool_call>{HERMES}", "", ADD),
    ("qwen3_coder", CODER.replace("<parameter=text>", "<parameter=text>\n<parameter=text>"), "", SAY),
    ("qwen3_coder", CODER.replace("</parameter>", "</parameter>\n</parameter>"), "", SAY),
    ("qwen3_coder", CODER.replace("<function=say>", "<function=say>\n<function=say>"), "", SAY),
    ("qwen3_coder", CODER.replace("</function>", "</function>\n</function>"), "", SAY),
    ("functiongemma", GEMMA.replace("<escape>", "<escape><escape>"), "", SAID),
    ("mistral", '[TOOL_CALLS]add[ARGS][ARGS]{"i": 42}', "", ADD),
    ("harmony", HARMONY.replace("<|message|>", "<|message|><|message|>"), "", ADD),
    ("harmony", HARMONY.replace("}", "}}"), "", ADD),
    # Marks are in values.
    ("hermes", HERMES.replace("42", '"a</tool_call>b"'), "", [("add", '{"i": "a</tool_call>b"}')]),
    (
        "qwen3_coder",
        CODER.replace("hello", "a </parameter> b\n</function>\n</tool_call>\n<tool_call> c"),
        "",
        [("say", '{"text": "a </parameter> b\\n</function>\\n</tool_call>\\n<tool_call> c", "count": 2}')],
    ),
    (
        "functiongemma",
        GEMMA.replace("hello", "a<escape>b"),
        "",
        [("say", '{"text": "a<escape>b", "any": "x"}')],
    ),
    ("pythonic", "[add(i='a<|python_end|>b)]')]", "", [("add", '{"i": "a<|python_end|>b)]"}')]),
    ("harmony", HARMONY.replace("42", '"a<|call|>b"'), "", [("add", '{"i": "a<|call|>b"}')]),
    # Other text is around or in a call.
    ("hermes", HERMES.replace("\n</tool_call>", " Now.\n</tool_call>\nDone"), "Now.\n\nDone", ADD),
    ("harmony", HARMONY.replace("}", "} Now."), "Now.", ADD),
    (
        "hermes",
        HERMES.replace('"i"', "i").replace("42", "42, x: y z, i: 3"),
        "",
        [("add", '{"i": 42, "x": "y z"}')],
    ),
    ("hermes", HERMES.replace("42", "NaN"), "", [("add", '{"i": "NaN"}')]),
    ("hermes", HERMES.replace('{"i": 42}', "null"), "", [("add", "{}")]),
    ("hermes", HERMES.replace("42", '42, "i": 43'), "", ADD),
    ("qwen3_coder", CODER.replace("count", "text"), "", [("say", '{"text": "hello"}')]),
    ("qwen3_coder", "A <function=add> begins a call.", "A <function=add> begins a call.", []),
    # Names and objects are in other forms.
    ("harmony", HARMONY.replace("functions.", ""), "", ADD),
    ("hermes", HERMES.replace("add", "functions.add"), "", ADD),
    ("qwen3_coder", CODER.replace("=say", "=functions.say"), "", SAY),
    ("pythonic", "[functions.add(i=42)]", "", ADD),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"i": 42}}, {"name": "add", "parameters": {"i": 42}}',
        "",
        ADD * 2,
    ),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "add", "parameters": {"i": 42}}}',
        "",
        ADD,
    ),
    ("hermes", HERMES.replace('{"name', '{"function": {"name').replace("}}", "}}}"), "", ADD),
]
"""A format, a text, the content in it (None: the whole text), and the calls in it."""


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_whole_text(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert read(name, [text]) == (text if content is None else content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_character_by_character(
    name: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    assert read(name, list(text)) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"i": "rm -rf /home/a', '{"i": "rm -rf /home/a'),
        ("qwen3_coder", "<function=say><parameter=text>rm -rf /home/a", '{"text": "rm -rf /home/a'),
        ("pythonic", "[say(text='rm -rf /home/a", '{"text": "rm -rf /home/a'),
        ("harmony", HARMONY[: HARMONY.index("42")] + '"rm -rf /home/a', '{"i": "rm -rf /home/a'),
    ],
)
def test_a_cut_call_is_not_completed(name: str, text: str, arguments: str) -> None:
    ((_, written),) = read(name, [text], cut=True)[1]
    assert written == arguments
    ((_, completed),) = read(name, [text])[1]
    assert completed == arguments + '"}'


WRITTEN: dict[str, list[str]] = {
    "hermes": [
        "<tool_call>", '{"name": "say", "arguments": {"text": %s, "count": 2', "}", "}", "</tool_call>",
    ],
    "llama3_json": ["<|python_tag|>", '{"name": "say", "parameters": {"text": %s, "count": 2', "}", "}"],
    "mistral": ["[TOOL_CALLS]", '[{"name": "say", "arguments": {"text": %s, "count": 2', "}", "}", "]"],
    "granite": ["<|tool_call|>", '[{"name": "say", "arguments": {"text": %s, "count": 2', "}", "}", "]"],
    "phi4_mini": [
        "<|tool_call|>", '[{"name": "say", "arguments": {"text": %s, "count": 2', "}", "}", "]",
        "<|/tool_call|>",
    ],
    "qwen3_coder": [
        "<tool_call>\n", "<function=say>\n", "<parameter=text>\n%s\n", "</parameter>\n",
        "<parameter=count>\n2\n", "</parameter>\n", "</function>\n", "</tool_call>",
    ],
    "pythonic": ["<|python_start|>", "[say(text=%s, count=2", ")", "]", "<|python_end|>"],
    "gemma": ["```tool_code\n", "[say(text=%s, count=2", ")", "]\n", "```"],
    "functiongemma": [
        "<start_function_call>", "call:say{text:<escape>%s<escape>,count:2", "}", "<end_function_call>",
    ],
    "olmo3": ["<function_calls>\n", "say(text=%s, count=2", ")\n", "</function_calls>"],
    "harmony": [
        "<|start|>", "assistant", "<|channel|>", "commentary to=functions.say ", "<|constrain|>", "json",
        "<|message|>", '{"text": %s, "count": 2', "}", "<|call|>",
    ],
}  # fmt: skip
"""The pieces of a call in each format; %s stands for the text."""
QUOTED = {name for name in WRITTEN if name not in ("qwen3_coder", "functiongemma")}
UNMARKED = [("mistral", 0), ("granite", 0), ("qwen3_coder", 1), ("harmony", 3)]
"""Pieces without which a call cannot be recognized, or its name is missing."""
TEXTS = ("hello", "a b, c.")


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """Return a format, a text with two calls, each of which may have a mark missing, doubled, or in its text,
    and the calls' texts."""
    name = draw(st.sampled_from(sorted(WRITTEN)))
    written, values = "", []
    for _ in range(2):
        pieces = WRITTEN[name]
        marks = [at for at in range(len(pieces)) if "%" not in pieces[at] and "<par" not in pieces[at]]
        quoted = [pieces[at].strip() for at in marks if len(pieces[at]) > 1]
        value = draw(st.sampled_from([*TEXTS, *(f"a {mark} b" for mark in quoted)]))
        values.append(value)
        index = draw(st.sampled_from(marks))
        least = 1 if (name, index) in UNMARKED else 0
        count = draw(st.integers(least, 2)) if value in TEXTS else 1
        call = "".join(piece * (count if at == index else 1) for at, piece in enumerate(pieces))
        written += call % (json.dumps(value) if name in QUOTED else value)
    return name, written, values


@given(damaged(), st.data())
def test_damaged_calls_are_read_whole(case: tuple[str, str, list[str]], data: st.DataObject) -> None:
    name, text, values = case
    content, calls = read(name, [text])
    assert content.strip() == ""
    assert [json.loads(arguments) for _, arguments in calls] == [
        {"text": value, "count": 2} for value in values
    ]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, pieces) == read(name, list(text)) == (content, calls)
