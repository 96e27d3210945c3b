"""Harmony's channels become reasoning, content and calls, wherever the text is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.text.harmony import HarmonyParser
from streamserve.text.reply_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    MergedEvents,
    ReasoningDelta,
    TextDelta,
)

THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
RECIPIENT_FIRST = CALL.replace(
    "assistant<|channel|>commentary to=functions.f ", "assistant to=functions.f<|channel|>commentary "
)
UNKNOWN = CALL.replace("functions.f", "functions.g")

Parsed = tuple[str, str, list[tuple[str | None, str]]]

CASES: list[tuple[str, Parsed]] = [
    (THOUGHT + FINAL, ("Hm, 1 < 2.", "Yes.", [])),
    (THOUGHT + CALL, ("Hm, 1 < 2.", "", [("f", '{"a": 1}')])),
    (THOUGHT + RECIPIENT_FIRST, ("Hm, 1 < 2.", "", [("f", '{"a": 1}')])),
    (' to=functions.f<|channel|>commentary<|message|>{"a": 1', ("", "", [("f", '{"a": 1}')])),
    (
        THOUGHT + THOUGHT.replace("<|channel", "<|start|>assistant<|channel"),
        ("Hm, 1 < 2.\nHm, 1 < 2.", "", []),
    ),
    ("<|channel|>commentary<|message|>I look.<|end|>" + CALL, ("", "I look.", [("f", '{"a": 1}')])),
    (CALL + CALL, ("", "", [("f", '{"a": 1}')] * 2)),
    (CALL.replace('{"a": 1}', ""), ("", "", [("f", "{}")])),
    (THOUGHT + UNKNOWN, ("Hm, 1 < 2.", UNKNOWN.removesuffix("<|call|>"), [])),
    ("Just text < here.", ("", "Just text < here.", [])),
    ("<|channel|>analysis", ("", "", [])),
    ("<|channel|>other<|message|>x", ("", "x", [])),
    ("<|start|>assistant<|message|>Hello", ("", "Hello", [])),
    ("<|start|>" + "x" * 600 + "<|start|>", ("", "x" * 600, [])),
    ("<|start|>" + "x" * 600 + "<|message|>y<|end|>", ("", "x" * 600 + "y", [])),
    ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes", ("Hm", "Yes", [])),
    ("", ("", "", [])),
]


def read(pieces: list[str], parallel: bool = True) -> Parsed:
    parser, merged = HarmonyParser({"f": {}}, parallel), MergedEvents()
    for piece in pieces:
        merged.add(parser.read(piece, False))
    merged.add(parser.read("", True))
    reasoning, content = "", ""
    calls: list[tuple[str | None, str]] = []
    last: object = None
    for event in merged:
        if isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert isinstance(last, CallBegin)
            calls[event.index] = calls[event.index][0], event.text
        elif isinstance(event, CallEnd):
            assert isinstance(last, CallArguments)
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        else:
            content += event.text
        last = event
    return reasoning, content, calls


@pytest.mark.parametrize(("text", "parsed"), CASES)
def test_a_whole_text(text: str, parsed: Parsed) -> None:
    assert read([text]) == parsed


@pytest.mark.parametrize(("text", "parsed"), CASES)
def test_character_by_character(text: str, parsed: Parsed) -> None:
    assert read(list(text)) == parsed


@given(
    st.lists(
        st.sampled_from(
            ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "x" * 600]
        )
        | st.sampled_from(
            ["<|return|>", "assistant", "analysis", "final", "commentary", " to=functions.f", "to=g", " "]
        )
        | st.sampled_from(["<", "<|", "|>", "{}", "\n", "x"])
    ),
    st.data(),
)
def test_any_split_gives_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text]) == read(list(text))
    for _, arguments in read([text])[2]:
        json.loads(arguments)


@given(st.text(st.characters(exclude_characters="<|")))
def test_text_without_channels_is_content(text: str) -> None:
    if not text.lstrip().startswith("to=") and text.strip():
        assert read([text]) == ("", text, [])


def test_only_one_call_without_parallel_calls() -> None:
    assert read([CALL + CALL], parallel=False)[2] == [("f", '{"a": 1}')]


def test_arguments_are_streamed() -> None:
    parser = HarmonyParser({"f": {}})
    begin, *pieces, end = [event for sign in CALL for event in parser.read(sign, False)]
    assert isinstance(begin, CallBegin)
    assert pieces == [CallArguments(0, written) for written in ("{", '"a": ', "1}")]
    assert end == CallEnd(0)


def test_events_are_in_the_order_of_the_messages() -> None:
    said = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    parser = HarmonyParser({"f": {}})
    events = parser.read(said + "<|start|>assistant" + THOUGHT + CALL + FINAL, True)
    kinds = [TextDelta, ReasoningDelta, CallBegin, CallArguments, CallEnd, TextDelta]
    assert [type(event) for event in events] == kinds
