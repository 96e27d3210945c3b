"""A GGUF file is served by its path: chats, grammars and settings work as for a folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from streamserve import LLM, SamplingParams
from streamserve.cli.main import app
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.grammar import Grammar
from streamserve.settings.checkpoints import locate, root_name
from tests.checkpoints import make_checkpoint, reference_model
from tests.ggufs import write_gguf

CHAT = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"), "qwen2")


@pytest.fixture(scope="module")
def file(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(source, path)
    return path


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[LLM]:
    with LLM(str(file), threads=1, log_level="warning") as llm:
        yield llm


def test_a_chat_is_answered_as_by_transformers(llm: LLM, source: Path) -> None:
    (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    prompt = "<|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([llm.tokenizer.encode(prompt)])
    assert output.prompt_token_ids == ids[0].tolist()
    assert ids[0, 0] == 2
    generated = reference_model(source).generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    expected = generated[0, ids.shape[1] :].tolist()
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].text == llm.tokenizer.decode(expected)


def test_a_grammar_limits_the_answer(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=20, grammar=Grammar(kind="regex", text="[ab]{4}")
    )
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert len(output.outputs[0].text) == 4
    assert set(output.outputs[0].text) <= {"a", "b"}


def test_models_are_located_by_file_or_folder(file: Path) -> None:
    assert locate(str(file)) == locate(str(file.parent)) == file
    assert root_name(str(file), str(file)) == str(file)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "absent.gguf",
            r"there is no file .*absent\.gguf: give a checkpoint folder, a \.gguf file, a hub name",
        ),
        ("model.bin", r"is a file: give the folder that contains its config\.json, or a \.gguf file"),
    ],
)
def test_files_that_are_no_models_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=reason):
        locate(str(tmp_path / name))


@pytest.mark.parametrize(
    "arguments", [["quantize", "--format", "int8"], ["inflate", "--hidden", "256", "--layers", "2"]]
)
def test_files_are_not_rewritten(file: Path, tmp_path: Path, arguments: list[str]) -> None:
    command, *options = arguments
    result = CliRunner().invoke(app, ["models", command, str(file), str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert "model.gguf is a GGUF file, which can be served" in result.output
    assert not (tmp_path / "out").exists()
