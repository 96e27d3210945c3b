"""A reply can be sent back unchanged to its route: a whole reply, or a stream that was cut anywhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.extras.responses.response_schemas import ResponseRequest
from tests.extras.reply_round_trip import (
    ODD,
    ROUTES,
    USER,
    WORDS,
    assert_round_trip,
    chat_of_response,
    checked,
    parts,
    written,
)
from tests.extras.reply_routes import (
    ADD,
    deltas_of,
)


@given(st.lists(st.sampled_from(WORDS), max_size=6).map("".join), st.lists(st.integers(0, 300), max_size=20))
def test_every_route_takes_back_what_it_sent(text: str, positions: list[int]) -> None:
    assert_round_trip(text, positions)


@pytest.mark.parametrize("arguments", ODD)
def test_odd_arguments(arguments: str) -> None:
    assert_round_trip(f"<think>Hm</think>Hi{written(arguments)}", list(range(200)))


def test_a_reply_cut_in_its_reasoning() -> None:
    deltas = deltas_of(["<think>", "Hm", "m"])
    for events_of, reply_of in ROUTES:
        _, reply, _ = reply_of(events_of(deltas))
        assert (reply["content"], reply["reasoning_content"]) == ("", "Hmm")


def test_an_empty_reply() -> None:
    for content in ([], "", None):
        _, reply, _ = checked([USER, {"role": "assistant", "content": content}, USER])
        assert reply["content"] == ""
    item = {"type": "message", "role": "assistant", "content": []}
    output: dict[str, Any] = {"type": "function_call_output", "call_id": "a", "output": []}
    messages = chat_of_response(ResponseRequest(input=[USER, item, output, USER])).messages
    assert [message["content"] for message in messages] == ["so?", "", "", "so?"]


def test_text_before_and_after_a_call_is_one_message() -> None:
    text = f"<think>Hm</think>I look.{ADD}Done."
    for events_of, reply_of in ROUTES:
        messages = reply_of(events_of(deltas_of([text])))
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert parts(messages) == ("I look.Done.", "Hm", [{"name": "add", "arguments": {"i": 42}}])


def test_reasoning_without_an_answer_is_kept() -> None:
    """Reasoning without an answer is kept: if a response was cut in its reasoning, the next text is not its
    answer."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}
    body = ResponseRequest(input=[USER, thought, USER, {**thought, "content": []}, USER])
    messages = checked(chat_of_response(body).messages)
    assert [message.get("reasoning_content") for message in messages] == [None, "Hm", None, None]
