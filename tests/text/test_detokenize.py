"""Every piece of text from the detokenizer is final, and the pieces add up to the decoded text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.text.detokenize import detokenizer
from streamserve.text.tokenizer import Tokenizer

CHARACTERS = st.sampled_from(
    [*"ab zé,\n▁", "你", "好", "🙂", "👩‍👩‍👧", "e\u0301\u0302", "\ufffd", "hello world"]
)
TEXTS = st.one_of(st.text(), st.lists(CHARACTERS).map("".join))


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    reader = detokenizer(tokenizer, skip)
    return [*(reader.feed(token) for token in ids), reader.flush()]


@given(text=TEXTS)
def test_texts_come_back_whole(bpe: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 350)), skip=st.booleans())
def test_any_tokens_come_back_as_decode_reads_them(
    bpe: Tokenizer, spm: Tokenizer, ids: list[int], skip: bool
) -> None:
    for tokenizer in (bpe, spm):
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(3, 258), max_size=12), last=st.integers(259, 300))
def test_runs_of_fallback_bytes_come_back_as_decode_reads_them(
    spm: Tokenizer, ids: list[int], last: int
) -> None:
    assert "".join(pieces(spm, [last, *ids, last])) == spm.decode([last, *ids, last])


@given(text=TEXTS)
def test_no_piece_ever_has_part_of_a_character(bpe: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode(text)
        given_out = ""
        for piece in pieces(tokenizer, ids):
            given_out += piece
            assert tokenizer.decode(ids).startswith(given_out)


def test_a_character_comes_with_its_last_byte(bpe: Tokenizer) -> None:
    ids = bpe.encode("🙃", add_special_tokens=False)
    assert len(ids) > 1
    assert pieces(bpe, ids) == [""] * (len(ids) - 1) + ["🙃", ""]


def test_an_unfinished_character_is_replaced_at_the_end(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode("🙃", add_special_tokens=False)[:-1]
        assert pieces(tokenizer, ids)[:-1] == [""] * len(ids)
        assert pieces(tokenizer, ids)[-1].strip("\ufffd") == ""


def test_a_space_inside_a_token_remains_after_a_skipped_token(spm: Tokenizer) -> None:
    hello = spm.encode("hello", add_special_tokens=False)
    assert pieces(spm, [1, *hello, 2, *hello]) == ["", "hello", "", " hello", ""]


@given(before=TEXTS, text=TEXTS)
def test_text_after_a_prompt_is_read_as_in_the_whole(
    bpe: Tokenizer, spm: Tokenizer, before: str, text: str
) -> None:
    for tokenizer in (bpe, spm):
        prompt = tokenizer.encode(f"hello {before}.")
        ids = tokenizer.encode(text, add_special_tokens=False)
        reader = detokenizer(tokenizer, prompt=prompt)
        read = "".join([*map(reader.feed, ids), reader.flush()])
        assert tokenizer.decode(prompt) + read == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("<s>hello", " world"),
        ("<s>hello\n", " world"),  # The last token has only a part of a character's bytes.
        ("<s>hello 🙂", " world"),  # a part of a character
        ("<s>hello</s>", "world"),  # a special token, after which another text begins
        ("", "world"),
    ],
)
def test_a_completion_keeps_its_first_space(spm: Tokenizer, before: str, text: str) -> None:
    prompt = spm.encode(before, add_special_tokens=False)
    world = spm.encode("world", add_special_tokens=False)
    assert spm.piece(world[0]) == "▁world"
    reader = detokenizer(spm, prompt=prompt)
    assert "".join([*map(reader.feed, world), reader.flush()]) == text


@pytest.mark.parametrize("token", [3 + 0xF0, 0, 5000, 262])
def test_the_work_per_token_does_not_grow_with_the_text(spm: Tokenizer, token: int) -> None:
    """The work for each token does not grow with the text: one byte, a special token, an unknown one and a
    plain one, repeated many times."""
    reader = detokenizer(spm, skip_special_tokens=True)
    start = time.process_time()
    for _ in range(20_000):
        reader.feed(token)
    assert time.process_time() - start < 10.0
