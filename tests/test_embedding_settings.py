"""The files of a checkpoint decide whether and how it embeds; settings that do not apply to it are
refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.loading.load import load
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.embedding import detect_task, read_embedding
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.text.reranker import scoring
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.embedders import make_embedder, write_modules
from tests.ggufs import write_gguf

NONE: dict[str, str] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2")


def test_the_task_is_that_of_the_files_unless_it_is_set(folder: Path, plain: Path) -> None:
    assert resolve(str(folder), environ=NONE).model.task == "embed"
    assert resolve(str(plain), environ=NONE).model.task == "generate"
    assert resolve(str(plain), {"task": "embed"}, environ=NONE).model.task == "embed"
    assert resolve("embedded", {"task": "embed"}, environ=NONE).model.draft == "none"
    assert resolve("embedded", environ=NONE).model.draft != "none"


def test_a_base_model_is_one_that_embeds(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path, architecture="llama")
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    assert detect_task(folder) == "embed"
    assert read_embedding(folder) == EmbeddingConfig(pooling="last", normalize=True)
    spec, checkpoint = open_checkpoint(folder, embeds=True)
    assert spec.architecture == "LlamaForCausalLM"
    assert "model.norm.weight" in checkpoint
    with pytest.raises(CheckpointError, match="architectures 'LlamaModel' is not supported"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("draft", "ngram"),
        ("draft", "self:1"),
        ("speculation_policy", "fixed:2"),
        ("speculation_mode", "rejection"),
        ("pairs", 1),
        ("tool_parser", "hermes"),
        ("reasoning_parser", "qwen3"),
    ],
)
@pytest.mark.parametrize("task", ["embed", "score"])
def test_settings_of_generated_text_are_refused(plain: Path, setting: str, value: Any, task: str) -> None:
    with pytest.raises(SettingsError, match=f"{setting} = .*: task = '{task}' generates no text"):
        resolve(str(plain), {"task": task, setting: value}, environ=NONE)


def test_a_gpu_is_refused(plain: Path) -> None:
    config = resolve(str(plain), {"task": "score", "backend": "device"}, environ=NONE).model
    with pytest.raises(CheckpointError, match="--task score is not computed on a GPU yet"):
        load(config)


def test_a_model_without_the_tokens_of_a_judgement_is_refused(plain: Path) -> None:
    with pytest.raises(CheckpointError, match='no tokens "no" and "yes"'):
        scoring(Tokenizer.from_folder(plain))


def write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens"])
def test_other_poolings_are_refused_by_name(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "config.json", {})
    write_modules(tmp_path, mode)
    with pytest.raises(CheckpointError, match=rf"1_Pooling/config.json: pooling {mode} is not supported"):
        read_embedding(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "{", "modules.json: cannot be read"),
        ("modules.json", {}, "must be a list of modules"),
        ("modules.json", [{"type": "a.Dense", "path": "2_Dense"}], "module Dense is not supported"),
        ("modules.json", [{"type": "a.Pooling", "path": "../x"}], "must name a folder next to it"),
        ("modules.json", [{"type": "a.Transformer", "path": "0_T"}], "the model must be next to it"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}], "has no Pooling module"),
        ("1_Pooling/config.json", {}, "pooling none is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "pooling mean, cls is not supported"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is not supported"),
        ("sentence_bert_config.json", {"max_seq_length": "8"}, "max_seq_length must be a positive integer"),
        ("config.json", {"matryoshka_dimensions": 8}, "matryoshka_dimensions must be a list"),
    ],
)
def test_damaged_or_other_files_are_refused(tmp_path: Path, file: str, content: Any, message: str) -> None:
    write(tmp_path / "config.json", {})
    write_modules(tmp_path, "lasttoken")
    write(tmp_path / file, content)
    with pytest.raises(CheckpointError, match=message):
        read_embedding(tmp_path)


def test_newer_files_name_the_pooling_by_one_field(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"matryoshka_dimensions": [64, 32]})
    write_modules(tmp_path, "lasttoken", normalize=False)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 100})
    expected = EmbeddingConfig(pooling="mean", normalize=False, max_tokens=100, dimensions=(64, 32))
    assert read_embedding(tmp_path) == expected


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (3, "last"), (2, None), (4, None)])
def test_a_gguf_file_names_its_pooling(plain: Path, tmp_path: Path, kind: int, pooling: Any) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(plain, file, change=lambda writer: writer.add_uint32("qwen2.pooling_type", kind))
    assert detect_task(file) == "embed"
    open_checkpoint(file)
    if pooling is None:
        with pytest.raises(CheckpointError, match=f"pooling_type {kind} is not supported"):
            read_embedding(file)
    else:
        assert read_embedding(file) == EmbeddingConfig(pooling=pooling)
