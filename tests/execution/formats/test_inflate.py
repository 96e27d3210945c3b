"""An inflated checkpoint computes the same function, in streamserve and in transformers, or is refused."""

import json
from pathlib import Path

import pytest
import torch

from streamserve.execution.formats.inflate import MARK, ModelShape, inflate, origin
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.errors import CheckpointError
from tests.checkpoints import make_checkpoint, reference_model

TOKENS = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(1))


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    with torch.no_grad():
        return reference_model(folder, dtype)(TOKENS).logits.float()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        ModelShape(256, 5),
        ModelShape(64, 7),
        ModelShape(256, 2, heads=4, kv_heads=2, intermediate=96),
        ModelShape(1024, 3),
    ],
)
def test_logits_are_the_same(tmp_path: Path, shape: ModelShape, tied: bool) -> None:
    source = make_checkpoint(tmp_path / "source", tie_word_embeddings=tied, rms_norm_eps=1e-3)
    inflate(source, tmp_path / "target", shape)
    spec = read_spec(tmp_path / "target")
    assert (spec.hidden_size, spec.num_layers) == (shape.hidden, shape.layers)
    difference = (logits(source) - logits(tmp_path / "target")).abs().max()
    assert difference < 1e-4
    assert logits(source).std() > 0.5


def test_bf16_weights_stay_exact(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype="bfloat16")
    inflate(source, tmp_path / "target", ModelShape(256, 4))
    assert (logits(source) - logits(tmp_path / "target")).abs().max() < 1e-4


def test_the_config_says_what_it_was(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    inflate(source, tmp_path / "target", ModelShape(256, 4))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config[MARK] == {"hidden_size": 64, "num_hidden_layers": 2, "source": "source"}
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_progress_is_reported_and_files_are_readable_as_usual(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    source = make_checkpoint(tmp_path / "source")
    layers = 2 * json.loads((source / "config.json").read_text())["num_hidden_layers"]
    hidden = json.loads((source / "config.json").read_text())["hidden_size"]
    inflate(
        source, tmp_path / "out", ModelShape(hidden=hidden, layers=layers), lambda *step: steps.append(step)
    )
    assert steps == [(done, layers + 1) for done in range(1, layers + 2)]
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "out" / "config.json").stat().st_mode}


def test_layers_are_spread_evenly_and_each_counts_once() -> None:
    for layers in range(3, 20):
        origins = [origin(layer, layers, 3) for layer in range(layers)]
        assert [number for number, effective in origins if effective] == [0, 1, 2]
        assert [number for number, _ in origins] == sorted(number for number, _ in origins)
    assert [layer for layer in range(24) if origin(layer, 24, 8)[1]] == list(range(0, 24, 3))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ModelShape(128, 2), "possible: 64, 256, 1024"),
        (ModelShape(192, 2), "possible"),
        (ModelShape(32, 2), "possible"),
        (ModelShape(256, 1), "cannot shrink"),
        (ModelShape(256, 2, intermediate=64), "cannot shrink"),
        (ModelShape(256, 2, heads=6), "2 each"),
        (ModelShape(256, 2, heads=2, kv_heads=1), "2 each"),
    ],
)
def test_shapes_that_are_not_exact_are_refused(tmp_path: Path, shape: ModelShape, words: str) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match=words):
        inflate(source, tmp_path / "target", shape)
    assert not (tmp_path / "target").exists()


def test_other_architectures_and_full_folders_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    with pytest.raises(CheckpointError, match="Qwen2ForCausalLM"):
        inflate(source, tmp_path / "target", ModelShape(256, 2))
    llama = make_checkpoint(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="not empty"):
        inflate(llama, source, ModelShape(256, 2))
