"""An edited text has the tokens of the whole text, and only few pieces of it are tokenized again."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from streamserve import embedded
from streamserve.text import retokenize
from streamserve.text.prompt_text import PromptText, joined
from streamserve.text.retokenize import EMPTY, Retokenizer, common_prefix, cuts_at_spaces
from streamserve.text.tokenizer import Tokenizer
from tests.conftest import Scale
from tests.text.folders import byte_level_folder, sentencepiece_folder

WORDS = [
    *"a e  \n\t'.,12 ",
    "the",
    " hello",
    "hello wor",
    "ld",
    "  ",
    " \n",
    "\r\n ",
    "don't",
    "123",
    "Grüße",
]
WORDS += [
    "日本",
    "日",
    "🙂",
    "👩‍👩‍👧"[:2],
    "e\u0301",
    "\u0301",
    " \u0308",
    "\u3000",
    "\x1c ",
    "▁",
    "<|begin|>",
]
WORDS += ["<tool>", "<|im_", "end|>", "</s>", "\u200b ", "\u180e ", "://x y", "#!", "    "]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=60).map("".join)


def _with(folder: Path, pre_tokenizer: Any, normalizer: Any = None) -> Path:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _split(index: int) -> Any:
    pattern = Regex(sorted(retokenize.SPLITS)[index])
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


KINDS: dict[str, Callable[[Path], Path]] = {
    "embedded": lambda folder: embedded.path("embedded"),
    "llama3": byte_level_folder,
    "gpt2": lambda folder: _with(byte_level_folder(folder), pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "nfc": lambda folder: _with(byte_level_folder(folder), _split(2), normalizers.NFC()),
    "split 0": lambda folder: _with(byte_level_folder(folder), _split(0)),
    "split 1": lambda folder: _with(byte_level_folder(folder), _split(1)),
    "split 3": lambda folder: _with(byte_level_folder(folder), _split(3)),
    "llama2": lambda folder: sentencepiece_folder(folder, tokenizer_class="LlamaTokenizer"),
    "llama2 legacy": lambda folder: sentencepiece_folder(
        folder, tokenizer_class="LlamaTokenizer", legacy=False
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer.from_folder(make(tmp_path_factory.mktemp("tokenizer")))
        for name, make in KINDS.items()
    }


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retokenize, "PIECE", 4)


def test_the_usual_pipelines_are_split(tokenizers: dict[str, Tokenizer]) -> None:
    assert {name for name, found in tokenizers.items() if cuts_at_spaces(found)} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_tokens_are_those_of_the_whole_text(
    name: str, texts: list[str], tokenizers: dict[str, Tokenizer]
) -> None:
    """A text that was appended to, truncated or replaced has the tokens of the whole text."""
    tokenizer = tokenizers[name]
    retokenizer, before = Retokenizer(tokenizer), EMPTY
    for text in [texts[0], "".join(texts), texts[0] + texts[-1], *texts]:
        before = retokenizer.encode(text, before)
        assert before.ids == tokenizer.encode(text, add_special_tokens=False)
        assert before.text == text


@pytest.mark.parametrize("name", KINDS)
@given(texts=st.lists(st.tuples(TEXTS, st.booleans()), min_size=2, max_size=5), kept=st.integers(0, 4))
def test_tokens_are_those_of_the_whole_prompt(
    name: str, texts: list[tuple[str, bool]], kept: int, tokenizers: dict[str, Tokenizer]
) -> None:
    """The whole prompt's tokens result, even if two versions differ only in which parts are literal."""
    tokenizer = tokenizers[name]
    retokenizer, before = Retokenizer(tokenizer), EMPTY
    parts = [tokenizer.literal(text) if literal else PromptText(text) for text, literal in texts]
    others = [PromptText(text) if literal else tokenizer.literal(text) for text, literal in texts]
    for version in (parts[:kept], parts, [*parts[:kept], *others[kept:]], others, parts[1:]):
        prompt = joined(*version)
        before = retokenizer.encode(prompt, before)
        assert before.ids == tokenizer.encode_prompt(prompt, add_special_tokens=False)
        assert before.prompt == prompt


@pytest.mark.parametrize("name", KINDS)
def test_merges_across_the_border_of_two_chunks(
    name: str, tokenizers: dict[str, Tokenizer], scale: Scale, record: Callable[..., None]
) -> None:
    """Tokens merge across the border of two chunks. Chunks are split anywhere, even within words, where
    separate tokens would differ."""
    tokenizer, rng = tokenizers[name], random.Random(scale.seed)
    retokenizer = Retokenizer(tokenizer)
    merged = 0
    for _ in range(scale.pick(40, 400)):
        text = "".join(rng.choices(WORDS, k=40)).replace("\u0301", "")
        start, before = 0, EMPTY
        while start < len(text):
            end = start + rng.randint(1, 12)
            alone = tokenizer.encode(text[start:end], add_special_tokens=False)
            after = retokenizer.encode(text[:end], before)
            assert after.ids == tokenizer.encode(text[:end], add_special_tokens=False)
            merged += after.ids != before.ids + alone
            start, before = end, after
    assert merged
    record(merged=merged)


def test_only_what_changed_is_tokenized(tokenizers: dict[str, Tokenizer]) -> None:
    class Counting(Tokenizer):
        characters = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            Counting.characters += len(text)
            return super().encode(text, add_special_tokens)

        def encode_without_gil(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
            Counting.characters += sum(map(len, texts))
            return super().encode_without_gil(texts, add_special_tokens)

    tokenizer = Counting.from_folder(embedded.path("embedded"))
    retokenizer = Retokenizer(tokenizer)
    text = "one word after the other, " * 1000
    before = retokenizer.encode(text)
    assert Counting.characters == len(text)
    after = retokenizer.encode(text + "and a last one", before)
    assert Counting.characters < len(text) + 60
    assert after.ids == tokenizers["embedded"].encode(text + "and a last one", add_special_tokens=False)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("an unknown regular expression", {"pattern": {"Regex": r"\w+\s*"}}),
        ("a split that drops spaces", {"behavior": "Removed"}),
    ],
)
def test_what_is_not_proven_is_tokenized_whole(what: str, change: dict[str, Any], tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["pre_tokenizer"]["pretokenizers"][0].update(change)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert_whole(Tokenizer.from_folder(folder))


@pytest.mark.parametrize("change", [{"rstrip": True}, {"single_word": True}, {"content": "one <tool>"}])
def test_added_tokens_that_reach_over_a_space(change: dict[str, Any], tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"][-2].update(change)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert_whole(Tokenizer.from_folder(folder))


def test_a_vocabulary_with_a_token_across_words(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path, tokenizer_class="LlamaTokenizer")
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a▁b"] = len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert_whole(Tokenizer.from_folder(folder))


def assert_whole(tokenizer: Tokenizer) -> None:
    assert not cuts_at_spaces(tokenizer)
    retokenizer = Retokenizer(tokenizer)
    before = retokenizer.encode("one <tool> two, and three")
    after = retokenizer.encode("one <tool> two, and four", before)
    assert after.ids == tokenizer.encode("one <tool> two, and four", add_special_tokens=False)


@given(first=st.text(alphabet="ab", max_size=20), second=st.text(alphabet="ab", max_size=20))
def test_common_prefix(first: str, second: str) -> None:
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert length in (len(first), len(second)) or first[length] != second[length]
