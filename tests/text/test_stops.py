"""Stop strings are found wherever the text is split, and are never sent."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamserve.text.stops import StopFinder

WORDS = st.text(alphabet="ab🙂", min_size=1, max_size=5)


def split(text: str, positions: list[int]) -> list[str]:
    marks = sorted({min(place, len(text)) for place in positions} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(marks)]


def read(finder: StopFinder, pieces: list[str]) -> tuple[str, str | None]:
    sent = ""
    for piece in pieces:
        scan = finder.feed(piece)
        sent += scan.text
        if scan.stop is not None:
            return sent, scan.stop
    return sent + finder.finish().text, None


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the first place where the text ends with a stop string, the longest one, by the plain
    definition."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="ab🙂", max_size=40),
    stops=st.lists(WORDS, max_size=4),
    positions=st.lists(st.integers(0, 40)),
)
def test_the_same_end_however_the_text_is_split(text: str, stops: list[str], positions: list[int]) -> None:
    assert read(StopFinder(tuple(stops)), split(text, positions)) == naive(text, tuple(stops))


@given(before=st.text(), stop=st.text(min_size=1), after=st.text(), positions=st.lists(st.integers(0, 60)))
def test_a_stop_anywhere_ends_the_text_there(
    before: str, stop: str, after: str, positions: list[int]
) -> None:
    assume(stop not in (before + stop)[:-1])
    assert read(StopFinder((stop,)), split(before + stop + after, positions)) == (before, stop)


@given(text=st.text(alphabet="ab", max_size=30), stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_what_is_held_back_is_only_a_beginning_of_a_stop(text: str, stop: str) -> None:
    finder, sent = StopFinder((stop,)), ""
    for end, character in enumerate(text, start=1):
        scan = finder.feed(character)
        sent += scan.text
        if scan.stop:
            break
        held = text[len(sent) : end]
        assert stop.startswith(held)
        assert len(held) < len(stop)


@pytest.mark.parametrize(
    ("stops", "text", "sent", "stop"),
    [
        (("\n\n",), "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (("abc", "b"), "xabc", "xa", "b"),
        (("bc", "abc"), "xabc", "x", "abc"),
        (("aab",), "aaab", "a", "aab"),
        (("end",), "the en", "the en", None),
        ((), "anything", "anything", None),
    ],
)
def test_examples(stops: tuple[str, ...], text: str, sent: str, stop: str | None) -> None:
    assert read(StopFinder(stops), list(text)) == (sent, stop)
    assert read(StopFinder(stops), [text]) == (sent, stop)


def test_the_stop_string_is_sent_when_requested() -> None:
    assert read(StopFinder(("END",), include_stop=True), ["so E", "ND and on"]) == ("so END", "END")
