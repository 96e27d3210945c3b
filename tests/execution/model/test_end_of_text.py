"""A text ends at every token that the model's files declare as an end."""

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.model.architectures import ARCHITECTURES
from streamserve.execution.model.spec import read_spec
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS_TOKEN_ID, SPECIAL_TOKENS, make_checkpoint
from tests.ggufs import write_gguf


def change(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file; `...` removes one."""
    values = (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}) | fields
    file.write_text(
        json.dumps({name: value for name, value in values.items() if value is not ...}), encoding="utf-8"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama whose files declare no end token; config.json says explicitly that there is none."""
    folder = make_checkpoint(tmp_path / "model", eos_token_id=None)
    change(folder / "tokenizer_config.json", eos_token=None)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_default_of_an_architecture_is_that_of_transformers(name: str) -> None:
    import transformers

    kind = "Gemma3TextConfig" if name == "Gemma3ForCausalLM" else name.replace("ForCausalLM", "Config")
    assert ARCHITECTURES[name].eos_token_id == getattr(transformers, kind)().eos_token_id


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, ..., (7,)),
        ([9, 7], ..., (7, 9)),
        (7, 5, (5, 7)),
        (7, [7, 300], (7, 300)),
        (None, 4, (4,)),
        (None, None, ()),
        (..., ..., (2,)),
        (..., None, (2,)),
        (..., 4, (4,)),
    ],
)
def test_the_ids_of_both_configs_count(
    folder: Path, in_config: object, in_generation: object, expected: tuple[int, ...]
) -> None:
    change(folder / "config.json", eos_token_id=in_config)
    change(folder / "generation_config.json", eos_token_id=in_generation)
    assert read_spec(folder).eos_token_ids == expected


def test_generation_config_may_be_missing(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_spec(folder).eos_token_ids == ()


@pytest.mark.parametrize("form", ["text", "object", "table", "older file"])
def test_the_id_of_the_tokenizer_counts(folder: Path, form: str) -> None:
    change(folder / "config.json", eos_token_id=1)
    settings, text = folder / "tokenizer_config.json", SPECIAL_TOKENS[EOS_TOKEN_ID]
    if form == "older file":
        change(folder / "special_tokens_map.json", eos_token={"content": text})
    else:
        change(settings, eos_token={"content": text} if form == "object" else text)
    if form == "table":
        change(settings, added_tokens_decoder={"0": {"content": "<|begin|>"}, "3": {"content": text}})
        (folder / "tokenizer.json").unlink()
    else:
        assert Tokenizer.from_folder(folder).eos_token_id == EOS_TOKEN_ID
    assert read_spec(folder).eos_token_ids == (1, EOS_TOKEN_ID)


def test_the_vocabulary_of_a_tokenizer_may_be_a_list(folder: Path) -> None:
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["x", -1.5], ["</s>", 0.0]]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    change(folder / "tokenizer_config.json", eos_token="</s>")
    assert read_spec(folder).eos_token_ids == (3,)


def test_a_token_that_the_tokenizer_does_not_have_is_none(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token="<|nowhere|>")
    assert read_spec(folder).eos_token_ids == ()
    (folder / "tokenizer.json").unlink()
    assert read_spec(folder).eos_token_ids == ()


@pytest.mark.parametrize("number", [320, -1, 10**30])
def test_an_id_outside_of_the_vocabulary_is_left_out_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    change(folder / "config.json", eos_token_id=[number, 5])
    change(folder / "generation_config.json", eos_token_id=number)
    with caplog.at_level(logging.WARNING):
        assert read_spec(folder).eos_token_ids == (5,)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / name}: eos_token_id: end-of-text id {number} is ignored: it is not among the model's 320 "
        "tokens"
        for name in ("config.json", "generation_config.json")
    ]


def test_a_default_outside_of_the_vocabulary_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "model", "phi3", vocab_size=64, eos_token_id=2)
    change(folder / "config.json", eos_token_id=...)
    (folder / "generation_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert read_spec(folder).eos_token_ids == ()
    assert "the default of eos_token_id: end-of-text id 32000 is ignored" in caplog.text


@pytest.mark.parametrize("number", [320, 2**32 - 1])
def test_an_id_outside_of_a_gguf_vocabulary_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop("tokenizer.ggml.eos_token_id", None)
        writer.add_eos_token_id(number)
        writer.add_eot_token_id(4)
        writer.add_eom_token_id(5)

    source = make_checkpoint(tmp_path / "source")
    write_gguf(source, tmp_path / "model.gguf", change=add)
    with caplog.at_level(logging.WARNING):
        spec, _ = open_checkpoint(tmp_path / "model.gguf")
    assert {4, 5} <= set(spec.eos_token_ids)
    assert f"tokenizer.ggml.eos_token_id: end-of-text id {number} is ignored" in caplog.text
    assert Tokenizer.from_folder(tmp_path / "model.gguf").eos_token_id is None
