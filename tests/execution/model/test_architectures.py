"""Loading handles architectures that differ from Llama in more than sizes, and refuses unsupported ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError

Shared = Callable[..., Path]

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
    "original_max_position_embeddings": 128,
}

PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


def config(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), threads=1, num_blocks=40, max_num_seqs=4, **fields)


def test_the_longest_text_decides_for_all_texts_which_factors_longrope_takes(shared_checkpoint: Shared):
    folder = shared_checkpoint("phi3", **LONGROPE)
    loaded = {limit: load(config(folder, max_model_len=limit)) for limit in (100, 128, 129, 500)}
    factors = {limit: one.model.spec.ropes[0].factors for limit, one in loaded.items()}
    assert factors[100] == factors[128] == (1.0,) * 8
    assert factors[129] == factors[500] == (2.0,) * 8
    fingerprints = [one.model_info.fingerprint for one in loaded.values()]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] == fingerprints[3]


def test_a_draft_model_takes_the_factors_for_its_targets_longest_text(shared_checkpoint: Shared):
    target, draft = shared_checkpoint(), shared_checkpoint("phi3", **LONGROPE)
    fingerprints = [
        load(config(target, max_model_len=limit, draft=str(draft))).draft_fingerprint
        for limit in (100, 128, 129)
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_a_device_refuses_by_name_what_its_kernels_do_not_compute(shared_checkpoint: Shared):
    folder = shared_checkpoint(
        "llama", hidden_size=320, num_attention_heads=160, num_key_value_heads=1, head_dim=2
    )
    for settings in ({"path": str(folder)}, {"path": str(shared_checkpoint()), "draft": str(folder)}):
        with pytest.raises(CheckpointError, match="160 query heads that share a key-value head"):
            load(ModelConfig(threads=1, num_blocks=40, max_num_seqs=4, backend="device", **settings))
