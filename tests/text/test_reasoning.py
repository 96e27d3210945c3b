"""Reasoning is separated from the answer, wherever the text is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.text.message import MessageParser
from streamserve.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
)
from streamserve.text.reply_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    MergedEvents,
    ReasoningDelta,
    TextDelta,
)
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.parser import ToolCallParser

CASES = [
    ("qwen3", "user", "<think>\nHm, 2 < 3 </thin\n\n</think>\n\nYes. ", ("Hm, 2 < 3 </thin", "Yes. ")),
    ("qwen3", "user", " Yes", ("", " Yes")),
    ("qwen3", "user", "  <thi", ("", "  <thi")),
    ("qwen3", "user", "<think>no end", ("no end", "")),
    ("qwen3", "<think>\n", "Hm\n</think>Yes", ("Hm", "Yes")),
    ("qwen3", "<think>\n\n</think>\n\n", "A <think> is a word", ("", "A <think> is a word")),
    ("qwen3", "<think>\n\n</think>\n\n", "\n\nYes <thi", ("", "Yes <thi")),
    ("qwen3", "<think>\n\n</think>\n\n", "<think>Hm\n</think>\n\nYes", ("Hm", "Yes")),
    ("deepseek_r1", "user", "Hm</think>Yes", ("Hm", "Yes")),
    ("deepseek_r1", "<think>\n", "<think>\nHm</think>\nYes </think>", ("Hm", "Yes </think>")),
    ("deepseek_r1", "user", "\n", ("", "")),
    ("mistral", "user", "[THINK]Hm[/THINK]Yes", ("Hm", "Yes")),
    ("granite", "user", "Here is my thought process: Hm\n\nHere is my response:\nYes", ("Hm", "Yes")),
    ("granite", "user", "Here's my thought process:\nHm Here Here's my response: Yes", ("Hm Here", "Yes")),
    ("granite", "user", "Here is my answer", ("", "Here is my answer")),
    (
        "granite3_3",
        "user",
        "<think>Hm</think>\n<response>\nYes </respon\n</response>\n",
        ("Hm", "Yes </respon\n"),
    ),
    ("granite3_3", "user", "<think>Hm</think> <resp", ("Hm", "<resp")),
    ("granite3_3", "user", "<think>Hm</think>Yes</response>", ("Hm", "Yes</response>")),
    ("granite3_3", "user", "<response> is a tag </response>", ("", "<response> is a tag </response>")),
]


def read(name: str, prompt: str, pieces: list[str]) -> tuple[str, str]:
    thinking = find_reasoning_format(name, None)
    assert thinking is not None
    reader = ReasoningParser(thinking, prompt)
    parts = [*map(reader.feed, pieces), reader.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(("name", "prompt", "text", "parsed"), CASES)
def test_a_whole_text(name: str, prompt: str, text: str, parsed: tuple[str, str]) -> None:
    assert read(name, prompt, [text]) == parsed


@given(st.sampled_from(CASES), st.data())
def test_every_split_gives_the_same(case: tuple[str, str, str, tuple[str, str]], data: st.DataObject) -> None:
    name, prompt, text, parsed = case
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, prompt, pieces) == parsed


@given(
    st.sampled_from([name for name in REASONING_FORMATS if name != "harmony"]),
    st.sampled_from(["user", "<think>\n", "<think>\n\n</think>\n\n"]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "x"])
        | st.sampled_from(["[THINK]", "[/THINK]", "<response>", "</response>", "Here is my ", "response:"])
        | st.sampled_from(["thought process:", "Here"])
    ),
)
def test_any_text_is_parsed_the_same_character_by_character(name: str, prompt: str, parts: list[str]) -> None:
    text = "".join(parts)
    assert read(name, prompt, list(text)) == read(name, prompt, [text])


@pytest.mark.parametrize(
    ("name", "template", "found"),
    [
        ("auto", "{{ '<think>' }}{{ '</think>' }}", ReasoningFormat(always=False)),
        ("auto", "no thought", None),
        ("auto", "{{ '<|im_start|>assistant\\n<think>' }}", ReasoningFormat()),
        ("auto", "[THINK] [/THINK]", REASONING_FORMATS["mistral"]),
        ("auto", "between <think></think> and <response></response>", REASONING_FORMATS["granite3_3"]),
        ("auto", "after 'Here is my thought process:'", REASONING_FORMATS["granite"]),
        ("auto", "<|channel|>analysis<|message|>", REASONING_FORMATS["harmony"]),
        ("auto", None, None),
        ("none", "</think>", None),
        ("qwen3", None, ReasoningFormat(always=False)),
        ("deepseek_r1", None, ReasoningFormat(always=True)),
    ],
)
def test_the_template_shows_the_reasoning_format(
    name: str, template: str | None, found: ReasoningFormat | None
) -> None:
    assert find_reasoning_format(name, template) == found


def test_calls_are_parsed_after_the_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = MessageParser(
        ReasoningParser(ReasoningFormat(always=False), "user"), ToolCallParser(FORMATS["hermes"], {"f": {}})
    )
    merged = MergedEvents()
    for sign in f"<think>\n{call}?\n</think>\nWell. {call} Bye":
        merged.add(reader.read(sign, False))
    assert not reader.read("", True)
    thought, before, begin, *rest = merged
    assert (thought, before) == (ReasoningDelta(f"{call}?"), TextDelta("Well."))
    assert isinstance(begin, CallBegin)
    assert (begin.index, begin.name) == (0, "f")
    assert rest == [CallArguments(0, "{}"), CallEnd(0), TextDelta(" Bye")]
