import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.extras.bench.events import EventSplitter, parse_event

STREAM = b': hello\n\ndata: {"a": 1}\r\n\r\ndata:{"b":\t2}\nid: 7\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_the_bytes_are_split(cuts: list[int]) -> None:
    splitter, positions = EventSplitter(), [0, *sorted(cuts), len(STREAM)]
    events = [data for start, end in pairwise(positions) for data in splitter.feed(STREAM[start:end])]
    assert events == [b'{"a": 1}', b'{"b":\t2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("choice", "has_text"),
    [
        ({"text": "a"}, True),
        ({"text": ""}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant", "content": None}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning_content": "hm"}}, True),
        ({"delta": {"reasoning": "hm"}}, True),
        ({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_only_generated_output_is_text(choice: dict[str, Any], has_text: bool) -> None:
    assert parse_event(json.dumps({"choices": [choice]}).encode()).has_text is has_text


def test_usage_and_errors_are_seen() -> None:
    event = parse_event(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}')
    assert event.usage is not None
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (3, 4)
    assert parse_event(b'{"error": {"message": "lost"}}').error == {"message": "lost"}
