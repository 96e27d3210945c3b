"""A reply has the same blocks in the same order on three routes, wherever its text is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extras.reply_routes import (
    ADD,
    CALL_FORMATS,
    NOW,
    STOPS,
    WORDS,
    Block,
    assert_blocks,
    assert_same_blocks,
    collected_message,
    deltas_of,
    message_events,
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
    (ADD.replace('{"i": 42}', "[null]"), [("call", "add [null]")]),
    ("Hi", [("content", "Hi")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "blocks"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blocks_are_in_the_order_of_the_text(text: str, blocks: list[Block], size: int) -> None:
    assert_blocks(deltas_of([text[start : start + size] for start in range(0, len(text), size)]), blocks)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_cut_short_is_the_beginning_of_one(size: int) -> None:
    text = f"Hi{ADD[: ADD.index('2}')]}"
    deltas = deltas_of([text[start : start + size] for start in range(0, len(text), size)], finish="length")
    first, (kind, call) = collected_message(message_events(deltas))
    assert (first, kind) == (("content", "Hi"), "call")
    assert 'add {"i": 42}'.startswith(call)
    assert_blocks(deltas, [first, (kind, call)])


def test_one_piece_ends_a_call_and_begins_a_text() -> None:
    """If one piece ends a call and begins a text, no part of the arguments is in the text, and no part of the
    text in the arguments."""
    begin, end = ADD[: ADD.index("2}")], ADD[ADD.index("2}") :]
    blocks = [("call", 'add {"i": 42}'), ("content", "Done.")]
    assert_blocks(deltas_of([begin, f"{end}Done."]), blocks)
    more = deltas_of([f"Hi{begin}", f"{end}Done.{NOW}"])
    assert_blocks(more, [("content", "Hi"), *blocks, ("call", "now {}")])


@given(
    st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from([None, *STOPS]),
    st.sampled_from(CALL_FORMATS),
)
def test_any_split_gives_the_same_blocks(
    text: str, positions: list[int], stop: str | None, format: str
) -> None:
    assert_same_blocks(text, positions, stop, format)
