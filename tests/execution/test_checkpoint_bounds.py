"""Absurd values of a config are refused in one line before anything is allocated or counted."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from streamserve.execution.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError

ABSURD: list[tuple[str, Any]] = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 3),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 2.0),
    ("hidden_size", 10**12),
    ("intermediate_size", 2**62),
    ("num_attention_heads", 10**30),
    ("num_key_value_heads", 10**9),
    ("head_dim", 10**10),
    ("vocab_size", 0),
    ("vocab_size", 10**15),
    ("max_position_embeddings", 10**18),
    ("rope_theta", float("nan")),
    ("rope_theta", 1e-30),
    ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
    ("rope_parameters", {"rope_type": "linear", "factor": float("inf")}),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", 1e300),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}),
]


@pytest.mark.parametrize(("field", "value"), ABSURD, ids=str)
def test_absurd_values_are_refused_at_once(shared_checkpoint, tmp_path, field, value):
    folder = Path(shutil.copytree(shared_checkpoint(), tmp_path / "absurd"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    started = time.process_time()
    with pytest.raises(CheckpointError) as error:
        load(ModelConfig(path=str(folder), threads=1, num_blocks=8))
    assert time.process_time() - started < 1.0
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_integer_of_thousands_of_digits_is_shown_in_part(shared_checkpoint, tmp_path):
    folder = Path(shutil.copytree(shared_checkpoint(), tmp_path / "absurd"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 10**4000}))
    with pytest.raises(CheckpointError, match="hidden_size must be at most") as error:
        load(ModelConfig(path=str(folder), threads=1, num_blocks=8))
    assert len(str(error.value)) < 500
