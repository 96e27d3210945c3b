"""Absurd values in a config are refused in one line before anything is allocated or computed."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from streamserve.execution.loading.load import load
from streamserve.execution.model.spec import read_spec
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
    ("max_position_embeddings", 2_000_000_000),
    ("rope_parameters", {"rope_type": "linear", "factor": 1e7}),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 1e7}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e7}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 65536, "original_max_position_embeddings": 512}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2**24 + 1}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 1e7, "low_freq_factor": 1, "high_freq_factor": 4}),
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
    assert f"{folder}/config.json: {field}" in str(error.value) or field.startswith("num_")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"max_position_embeddings": 2**24}, 2**24),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 32768.0}}, 2**24),
        ({"rope_parameters": {"rope_type": "linear", "factor": 65536}}, 512),
    ],
    ids=str,
)
def test_the_largest_contexts_are_served(shared_checkpoint, tmp_path, fields, positions):
    folder = Path(shutil.copytree(shared_checkpoint(), tmp_path / "long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    assert read_spec(folder).max_position_embeddings == positions


def test_an_integer_of_thousands_of_digits_is_shown_in_part(shared_checkpoint, tmp_path):
    folder = Path(shutil.copytree(shared_checkpoint(), tmp_path / "absurd"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 10**4000}))
    with pytest.raises(CheckpointError, match="hidden_size must be at most") as error:
        load(ModelConfig(path=str(folder), threads=1, num_blocks=8))
    assert len(str(error.value)) < 500
