"""A reply becomes events. Stop strings apply only to its answer, and null arguments become an empty
object."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.text.message import MessageParser
from streamserve.text.reasoning import REASONING_FORMATS, ReasoningParser
from streamserve.text.reply_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    MergedEvents,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)
from streamserve.text.reply_reader import ReplyReader
from streamserve.text.stops import StopFinder
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.parser import ToolCallParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call>'
ARGUMENTS = CallArguments(0, '{"a": "STOP"}')


def reader_of(stop: tuple[str, ...] = ("STOP",), include_stop: bool = False) -> ReplyReader:
    thoughts = ReasoningParser(REASONING_FORMATS["qwen3"], "user")
    calls = ToolCallParser(FORMATS["hermes"], {"f": {}})
    return ReplyReader(MessageParser(thoughts, calls), StopFinder(stop, include_stop))


def read(reader: ReplyReader, text: str, size: int, cut: bool = False) -> tuple[list[ReplyEvent], str | None]:
    """Return the merged events of a text in pieces of `size`, without ids of calls, and the stop string that
    was found."""
    merged, stop = MergedEvents(), None
    for start in range(0, len(text), size):
        scan = reader.feed(text[start : start + size])
        merged.add(scan.events)
        stop = scan.stop
        if stop is not None:
            break
    if stop is None:
        if cut:
            reader.cut()
        scan = reader.finish()
        merged.add(scan.events)
        stop = scan.stop
    return [CallBegin(0, "", each.name) if isinstance(each, CallBegin) else each for each in merged], stop


WHOLE_CALL = [CallBegin(0, "", "f"), ARGUMENTS, CallEnd(0)]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "events", "stop", "called"),
    [
        ("<think>a STOP</think>b", [ReasoningDelta("a STOP"), TextDelta("b")], None, False),
        ("<think>a STOP</think>b STOP c", [ReasoningDelta("a STOP"), TextDelta("b ")], "STOP", False),
        ("<think>a STOP", [ReasoningDelta("a STOP")], None, False),
        (CALL, WHOLE_CALL, None, True),
        (f"{CALL} b STOP c{CALL}", [*WHOLE_CALL, TextDelta(" b ")], "STOP", True),
        (f"b STOP{CALL}", [TextDelta("b ")], "STOP", False),
        (f"ST{CALL}OP", [TextDelta("ST"), *WHOLE_CALL, TextDelta("OP")], None, True),
        ("b ST", [TextDelta("b ST")], None, False),
    ],
)
def test_a_stop_string_acts_in_the_answer_only(
    text: str, events: list[ReplyEvent], stop: str | None, called: bool, size: int
) -> None:
    reader = reader_of()
    assert read(reader, text, size) == (events, stop)
    assert reader.called == called


def test_the_stop_string_is_in_the_answer_when_requested() -> None:
    assert read(reader_of(include_stop=True), "b STOP c", 3) == ([TextDelta("b STOP")], "STOP")


def test_pieces_before_min_tokens_are_not_searched() -> None:
    reader = reader_of()
    assert reader.feed("a STOP ", searched=False).events == (TextDelta("a STOP"),)
    assert reader.feed("b STOP").stop == "STOP"


@pytest.mark.parametrize(
    ("text", "cut", "called"),
    [
        (CALL[: CALL.index('"}}')], True, False),
        (CALL[: CALL.index("}</")], False, True),  # Only the last } and the mark are missing.
        (CALL[: CALL.index("}</")], True, True),
        (f"{CALL}<tool_call>", True, True),
        (f"{CALL}{CALL[: CALL.index('STOP')]}", True, False),
        ("b", True, False),
    ],
)
def test_a_reply_that_ends_within_a_call_has_not_called(text: str, cut: bool, called: bool) -> None:
    """A reply that ends within a call has no call. `cut`: it is ended by a stop token of the request."""
    reader = reader_of()
    read(reader, text, 5, cut)
    assert reader.called == called


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("null", "{}"),
        ("[null]", "[null]"),
        ('{"n": null}', '{"n": null}'),
        ("{}", "{}"),
    ],
)
def test_null_arguments_are_an_empty_object(written: str, arguments: str, size: int) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    reader = reader_of()
    assert read(reader, text, size)[0][1:] == [CallArguments(0, arguments), CallEnd(0)]
    assert reader.called


def test_null_arguments_at_the_end_of_the_text() -> None:
    reader = reader_of()
    events, _ = read(reader, '<tool_call>{"name": "f", "arguments": null', 5)
    assert events[:2] == [CallBegin(0, "", "f"), CallArguments(0, "{}")]
    assert reader.called


LETTERS = st.text("xyz", max_size=6)


@given(LETTERS, LETTERS, LETTERS, LETTERS, st.text("xyz", min_size=1, max_size=3), st.integers(1, 200))
def test_stop_strings_reasoning_and_calls(
    thought: str, before: str, value: str, after: str, stop: str, size: int
) -> None:
    arguments = json.dumps({"a": value})
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    reader = reader_of((stop,))
    events, found = read(reader, f"<think>{thought}</think>{before}{call}{after}", size)
    expected: list[ReplyEvent] = [ReasoningDelta(thought), TextDelta(before.partition(stop)[0])]
    if stop not in before:
        expected += [CallBegin(0, "", "f"), CallArguments(0, arguments), CallEnd(0)]
        expected += [TextDelta(after.partition(stop)[0])]
    assert events == [each for each in expected if getattr(each, "text", "-")]
    assert found == (stop if stop in before or stop in after else None)
    assert reader.called == (stop not in before)
