"""The tokenizer agrees with transformers' AutoTokenizer, and reports what it cannot load."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve import embedded
from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.text.folder import read_folder
from streamserve.text.prompt_text import PromptText
from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder, sentencepiece_folder

TEXTS = [
    "",
    "hello world",
    " hello",
    "  hello\n\n  wor1234ld  ",
    "<|im_start|>user\nhi<|im_end|>",
    "a</s>hello</s> hello",
    "<s>hello",
    "▁hello",
    "Grüße 你好 🙂👩‍👩‍👧 e\u0301\u0302",
    "\x00\t\r\n",
    "<tool>日本</tool>",
]


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_agrees(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"eos_token": "<tool>"}])
def test_byte_level_agrees_with_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Byte-level tokenizers agree with transformers, even if tokenizer.json marks a token as plain that the
    settings name as special."""
    folder = byte_level_folder(tmp_path, **settings)
    assert_agrees(folder)
    assert Tokenizer.from_folder(folder).is_special(340) == ("eos_token" in settings)


@pytest.mark.parametrize(
    "tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]
)
@pytest.mark.parametrize("settings", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
def test_llama_style_agrees_with_transformers(
    tmp_path: Path, tokenizer_class: str, settings: dict[str, Any]
) -> None:
    assert_agrees(sentencepiece_folder(tmp_path, tokenizer_class=tokenizer_class, **settings))


def test_mistral_with_the_llama_class_agrees_with_transformers(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert_agrees(folder)


@given(text=st.text())
def test_a_text_survives_encode_and_decode(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text), skip_special_tokens=False) == "<|begin|>" + text


@given(ids=st.lists(st.integers(0, 341)))
def test_token_bytes_are_what_decode_reads(bpe: Tokenizer, ids: list[int]) -> None:
    joined = b"".join(bpe.token_bytes(token) for token in ids)
    assert joined.decode("utf-8", errors="replace") == bpe.decode(ids, skip_special_tokens=False)


def test_token_bytes_of_a_vocabulary_with_byte_fallback(spm: Tokenizer) -> None:
    ids = spm.encode("hello 🙂", add_special_tokens=False)
    assert b"".join(spm.token_bytes(token) for token in ids) == " hello 🙂".encode()
    assert spm.token_text(3 + 0xF0) == r"\xf0"
    assert spm.is_byte_piece(3 + 0xF0)
    assert not spm.is_byte_piece(spm.encode("hello")[-1])


def test_ids_outside_of_the_vocabulary_have_no_text(bpe: Tokenizer) -> None:
    assert bpe.decode([10**6]) == bpe.token_text(10**6) == ""


def test_longest_token_bounds_the_length_of_a_text(bpe: Tokenizer) -> None:
    text = "the quick brown fox " * 50
    assert len(text) <= bpe.longest_token * len(bpe.encode(text, add_special_tokens=False))


def test_lone_surrogates_are_refused(bpe: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        bpe.encode("\ud800")


def test_a_pattern_that_takes_too_many_steps_refuses_the_text(tmp_path: Path) -> None:
    """The library panics, which is no Exception."""
    folder = byte_level_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a+)+$"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, text = Tokenizer.from_folder(folder), "a" * 30 + "c"
    literal = PromptText(text, ((0, len(text)),))
    for encode in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_without_gil([text]),
        lambda: tokenizer.encode_prompt(literal),
    ):
        with pytest.raises(RequestError, match="tokenizer cannot encode the text: Onig"):
            encode()
    assert tokenizer.decode(tokenizer.encode("a c")) == "a c"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(folder).encode("hello world, hello world")) > 4


def test_chat_template_file_comes_before_the_setting(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, chat_template="from the settings")
    assert Tokenizer.from_folder(folder).chat_template == "from the settings"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(folder).chat_template == "from the file"


def test_of_named_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "first"}, {"name": "default", "template": "second"}]
    assert Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=named)).chat_template == "second"


def test_chat_templates_of_a_folder_by_name(tmp_path: Path) -> None:
    named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    folder = byte_level_folder(tmp_path, chat_template=named)
    assert templates(folder) == ("default", "tool_use")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    assert templates(folder) == ("default", "file for tools")
    (folder / "chat_template.jinja").write_text("file")
    assert templates(folder) == ("file", "file for tools")
    assert reference(folder).chat_template == {"default": "file", "tool_use": "file for tools"}


def templates(folder: Path) -> tuple[str | None, str | None]:
    read = read_folder(folder)
    return read.chat_template, read.tool_template


def test_special_tokens_of_an_older_folder(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, eos_token=None)
    entry = {"content": "<|end|>", "lstrip": False, "rstrip": False, "normalized": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": entry}))
    assert Tokenizer.from_folder(folder).eos_token_id == reference(folder).eos_token_id == 1


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be text"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_a_folder_without_any_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"has no tokenizer: put the model's tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_older_formats_are_converted(byte_level: Path, tmp_path: Path) -> None:
    model = json.loads((byte_level / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert Tokenizer.from_folder(tmp_path).encode("the quick fox") == reference(tmp_path).encode(
        "the quick fox"
    )


def test_loading_imports_neither_torch_nor_transformers(byte_level: Path) -> None:
    code = (
        "import sys; from streamserve.text import chat, output, tokenizer;"
        "tokenizer.Tokenizer.from_folder(sys.argv[1]).encode('hi');"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(byte_level)], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("name", ["embedded", "embedded-draft"])
def test_the_packaged_models_agree_with_transformers(name: str) -> None:
    assert_agrees(embedded.path(name))
