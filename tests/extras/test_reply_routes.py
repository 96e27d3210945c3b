"""A reply has the same blocks in the same order on three routes, wherever its text is split."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extras.reply_routes import (
    ADD,
    NOW,
    Block,
    chat_events,
    collected_chat,
    collected_message,
    collected_response,
    deltas_of,
    message_events,
    response_events,
)

CASES: list[tuple[str, list[Block]]] = [
    (f"<think>Hm</think>I look. {ADD} Done.", [
        ("reasoning", "Hm"), ("content", "I look."), ("call", 'add {"i": 42}'), ("content", " Done."),
    ]),
    (f"{ADD}{NOW}", [("call", 'add {"i": 42}'), ("call", "now {}")]),
    (f"{ADD}Then{NOW}Bye", [
        ("call", 'add {"i": 42}'), ("content", "Then"), ("call", "now {}"), ("content", "Bye"),
    ]),
    (ADD.replace('{"i": 42}', "null"), [("call", "add {}")]),
    (ADD.replace('{"i": 42}', '"null"'), [("call", "add {}")]),
    (ADD.replace('{"i": 42}', "[null]"), [("call", "add [null]")]),
    (ADD[: ADD.index("2}")], [("call", 'add {"i": 4')]),
    ("Hi", [("content", "Hi")]),
]  # fmt: skip

WORDS = st.sampled_from(
    ["<think>", "</think>", "Hi", " ", "\n", ADD, NOW, ADD[:-12], ADD[11:], "<tool_call>", "</tool_call>"]
) | st.sampled_from(["}", "{", '"', "42", "null", ADD.replace('{"i": 42}', "null"), "x", NOW[:30]])


def assert_blocks(pieces: list[str], blocks: list[Block], stop: tuple[str, ...] = ()) -> None:
    deltas = deltas_of(pieces, stop=stop)
    assert collected_chat(chat_events(deltas)) == blocks
    assert collected_message(message_events(deltas)) == blocks
    assert collected_response(response_events(deltas)) == blocks


@pytest.mark.parametrize(("text", "blocks"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blocks_are_in_the_order_of_the_text(text: str, blocks: list[Block], size: int) -> None:
    assert_blocks([text[start : start + size] for start in range(0, len(text), size)], blocks)


def test_one_piece_ends_a_call_and_begins_a_text() -> None:
    """No part of the arguments is in the text, and no part of the text in the arguments."""
    begin, end = ADD[: ADD.index("2}")], ADD[ADD.index("2}") :]
    blocks = [("call", 'add {"i": 42}'), ("content", "Done.")]
    assert_blocks([begin, f"{end}Done."], blocks)
    assert_blocks([f"Hi{begin}", f"{end}Done.{NOW}"], [("content", "Hi"), *blocks, ("call", "now {}")])


@given(st.lists(WORDS, max_size=8).map("".join), st.lists(st.integers(0, 200), max_size=6))
def test_any_split_gives_the_same_blocks(text: str, positions: list[int]) -> None:
    cuts = sorted({min(position, len(text)) for position in positions} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    blocks = collected_message(message_events(deltas_of([text])))
    for split in (pieces, list(text)):
        assert_blocks(split, blocks)


@given(
    st.lists(WORDS, max_size=8).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from(["H", "Hi", "i<", "}", "4", "null", "\n", " ", "think", "tool", "x}"]),
)
def test_any_split_ends_at_the_same_stop_string(text: str, positions: list[int], stop: str) -> None:
    cuts = sorted({min(position, len(text)) for position in positions} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    whole = deltas_of([text], stop=(stop,))
    blocks = collected_message(message_events(whole))
    for split in (pieces, list(text)):
        assert_blocks(split, blocks, (stop,))
        last = deltas_of(split, stop=(stop,))[-1]
        assert (last.finish, last.stop, last.called) == (whole[-1].finish, whole[-1].stop, whole[-1].called)
    contents = [part for kind, part in blocks if kind == "content"]
    assert all(stop not in part for part in contents)
    if whole[-1].stop is None:
        assert blocks == collected_message(message_events(deltas_of([text])))
