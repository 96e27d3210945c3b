"""Texts of special tokens are found where the tokenizer finds them, and encoded without special tokens."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend

from streamserve.text.prompt_text import PromptText, joined
from streamserve.text.special_text import SpecialTexts, alternation
from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder, sentencepiece_folder

PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<|end|>",
    "<s>",
    "</s>",
    "<unk>",
    "<tool>",
    "<|im_",
    "end|>",
    " hello",
]
TEXTS = st.lists(st.sampled_from([*PIECES, " ", "\n", "日本", "a"]), max_size=8).map("".join)


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token for token in ids if tokenizer.is_special(token)]


@given(texts=st.lists(st.text("ab<|", min_size=1, max_size=4), min_size=1, unique=True), text=st.text("ab<|"))
def test_the_longest_text_is_matched(texts: list[str], text: str) -> None:
    ours = [match.span() for match in re.finditer(alternation(texts), text)]
    plain = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    assert ours == [match.span() for match in re.finditer(plain, text)]


@given(text=TEXTS)
def test_a_literal_text_has_no_special_tokens_and_all_its_characters(
    bpe: Tokenizer, spm: Tokenizer, text: str
) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode_prompt(tokenizer.literal(text), add_special_tokens=False)
        assert not specials(tokenizer, ids)
        assert tokenizer.decode(ids, skip_special_tokens=False).lstrip(" ") == text.lstrip(" ")


@given(before=TEXTS, text=TEXTS, after=TEXTS)
def test_special_tokens_around_a_literal_text_are_kept(
    bpe: Tokenizer, spm: Tokenizer, before: str, text: str, after: str
) -> None:
    """Special tokens around a literal text are kept: the template's marks are recognized, even next to a text
    that contains the same marks."""
    for tokenizer in (bpe, spm):
        mark = "<|im_end|>" if tokenizer is bpe else "</s>"
        prompt = joined(before + mark, tokenizer.literal(text), mark + after)
        ids = tokenizer.encode_prompt(prompt)
        plain = tokenizer.encode(joined(before + mark, mark + after).text)
        assert specials(tokenizer, ids) == specials(tokenizer, plain)


@given(text=TEXTS)
def test_without_literal_parts_tokens_are_those_of_encode(bpe: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (bpe, spm):
        assert tokenizer.encode_prompt(PromptText(text)) == tokenizer.encode(text)


@pytest.mark.parametrize(("legacy", "space"), [(False, ""), (True, "▁")])
def test_text_after_a_literal_part_gets_no_space(tmp_path: Path, legacy: bool, space: str) -> None:
    spm = Tokenizer.from_folder(sentencepiece_folder(tmp_path, legacy=legacy))
    prompt = joined("hello ", spm.literal("</s>"), " world</s>hello")
    pieces = [spm.piece(token) for token in spm.encode_prompt(prompt)]
    assert pieces[:2] == ["<s>", "▁hello"]
    assert "".join(pieces[2:]) == f"▁<0x3C><0x2F>s<0x3E>▁world</s>{space}hello"


def test_added_tokens_that_are_not_special_stay_tokens(bpe: Tokenizer) -> None:
    ids = bpe.encode_prompt(bpe.literal("<|im_end|>a<tool>日本"))
    assert ids[-2:] == [bpe.encode("<tool>")[-1], bpe.encode("日本")[-1]]


def test_text_that_a_normalizer_converts_to_a_special_token_is_found(tmp_path: Path) -> None:
    backend = Backend.from_file(str(byte_level_folder(tmp_path) / "tokenizer.json"))
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend)
    text = "a\uff1cend\uff1eb"
    assert specials(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.special_spans(text) == [(1, 6)]
    ids = tokenizer.encode_prompt(tokenizer.literal(text), add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<end>b"
    assert not specials(tokenizer, ids)


def test_a_model_whose_vocabulary_has_the_special_token_does_not_use_it() -> None:
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((character, -3.0) for character in "</s>ab")]
    backend = Backend(models.Unigram(vocabulary, unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>"])
    texts = SpecialTexts(backend, unknown=0)
    assert texts.spans("a</s>b") == [(1, 5)]
    (ids,) = texts.encode_ordinary(["</s>"])
    assert [backend.id_to_token(token) for token in ids] == list("</s>")


def test_old_folders_mark_their_named_tokens_in_another_file(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "sep_token": "[SEP]"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_spans("a[SEP]") == [(1, 6)]


@pytest.mark.parametrize("count", [20_000])
def test_many_special_tokens_are_encoded_in_bounded_time(bpe: Tokenizer, count: int) -> None:
    prompt = bpe.literal("<|im_end|>" * count)
    assert len(prompt.literal) == count
    assert not specials(bpe, bpe.encode_prompt(prompt, add_special_tokens=False))
