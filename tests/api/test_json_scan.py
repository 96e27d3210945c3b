"""The JSON scan limits the number of objects that the decoder creates, however the text is split into
pieces."""

import json
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.api.http.json_scan import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, PIECE, JsonScan
from streamserve.api.http.memory import VALUE_BYTES
from streamserve.protocol.errors import RequestError

TEXTS = st.text(st.sampled_from('a"\\[]{},:é😀\n'), max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXTS,
    lambda below: st.lists(below, max_size=5) | st.dictionaries(TEXTS, below, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Return the counts of values and names, of lists and objects, and the depth."""
    if isinstance(value, dict):
        below = [counted(part) for part in value.values()]
        names = len(value)
    elif isinstance(value, list):
        below, names = [counted(part) for part in value], 0
    else:
        return 1, 0, 0
    values, containers, depths = zip(*below, strict=True) if below else ((), (), (0,))
    return 1 + names + sum(values), 1 + sum(containers), 1 + max(depths)


@given(VALUES, st.integers(1, 7), st.booleans())
def test_counts_are_bounds_however_the_text_is_cut(value: Any, size: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    scan = JsonScan()
    for start in range(0, len(text), size):
        scan.feed(text[start : start + size])
    values, containers, depth = counted(value)
    assert (scan.containers, scan.depth) == (containers, depth)
    assert values <= scan.values <= values + containers
    assert msgspec.json.decode(text) == value


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" + b"{}," * MAX_CONTAINERS + b"{}]", "lists and objects"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "values"),
        (b"{" + b'"a":1,' * MAX_NAMES + b'"a":1}', "names"),
        (b'["' + b"\\n" * (5 << 20) + b'"]', "backslashes"),
        (b"[" * 65 + b"]" * 65, "64 levels"),
    ],
)
def test_what_is_too_much_is_refused_by_name(text: bytes, what: str) -> None:
    with pytest.raises(RequestError, match=what) as refused:
        JsonScan().feed(text)
    assert refused.value.status == 400


def test_text_is_not_structure() -> None:
    scan = JsonScan()
    scan.feed(json.dumps({"prompt": '{[,:]}\\" ' * 100_000}).encode())
    assert (scan.values, scan.containers, scan.depth) == (3, 1, 1)


@pytest.mark.parametrize(
    ("text", "wide"),
    [("a" * 1000, 1), ("a\\u00e9" * 99, 2), ("aé" * 99, 2), ("a\\ud83d\\ude00", 4), ("a😀" * 9, 4)],
)
def test_one_wide_character_makes_all_of_its_text_wide(text: str, wide: int) -> None:
    scan = JsonScan()
    data = f'"{text}"'.encode()
    scan.feed(data)
    assert scan.decoded_bytes == wide * len(data) + VALUE_BYTES
    cut = JsonScan()
    for byte in data:
        cut.feed(bytes([byte]))
    assert cut.decoded_bytes >= scan.decoded_bytes


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("character", ["a", "é", "😀", '"', "\\"])
def test_a_text_that_fits_is_decoded(character: str, ascii_only: bool) -> None:
    limit = 2 * PIECE
    text = json.dumps({"a": ["b", character * limit, "c"] * 2}, ensure_ascii=ascii_only)
    scan = JsonScan(max_characters=limit)
    scan.feed(text.encode())
    assert scan.decoded_bytes >= 2 * limit, "the whole text was scanned"


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("character", ["a", "é", "😀"])
def test_a_text_that_is_far_too_long_is_refused_before_it_is_decoded(
    character: str, ascii_only: bool
) -> None:
    limit = 2 * PIECE
    text = json.dumps({"a": ["b", character * 13 * limit]}, ensure_ascii=ascii_only).encode()
    pieces = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    scan = JsonScan(max_characters=limit)
    with pytest.raises(RequestError, match=f"over {limit} characters"):
        deque(map(scan.feed, pieces), maxlen=0)
