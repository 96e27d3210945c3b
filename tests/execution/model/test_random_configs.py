"""Models with random configs are computed as transformers computes them, in plain torch and by the kernels.
All other configs are refused by a field's name."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.protocol.errors import CheckpointError
from tests.checkpoints import VISION, model_class, randomize
from tests.conftest import Scale
from tests.execution.backends.native.forwarding import logits_of as native_logits_of
from tests.execution.random_configs import FAMILIES, field_names, random_config
from tests.execution.variants import TEXT, logits_of


@pytest.fixture(scope="module")
def pool() -> ThreadPool | None:
    """The threads of the kernels; None on a machine without kernels."""
    library = kernels()
    return ThreadPool(library, 2) if library else None


@torch.inference_mode()
def written(folder: Path, config: dict[str, Any], seed: int) -> torch.Tensor | None:
    """Write a random model with a config as it is published. Return transformers' logits [60, vocabulary] for
    TEXT; None if transformers cannot compute this config."""
    from transformers import AutoConfig

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        parsed = AutoConfig.from_pretrained(folder)
        model = model_class(config["model_type"]).from_config(parsed, dtype=torch.float32).eval()
        randomize(model, torch.Generator().manual_seed(seed))
        logits: torch.Tensor = model(TEXT).logits[0]
    except Exception:  # its classes refuse configs with errors of many kinds
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    return logits


def logits_or_reason(folder: Path) -> torch.Tensor | str:
    """Return streamserve's logits for TEXT, or why it refuses the model."""
    try:
        return logits_of(folder, [60])
    except CheckpointError as error:
        return str(error).removeprefix(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_config_is_computed_as_by_transformers_or_refused_by_name(
    tmp_path: Path, family: str, scale: Scale, pool: ThreadPool | None
) -> None:
    rng = random.Random(f"{family} {scale.seed}")
    equal, valid, number = 0, 0, 0
    while valid < scale.pick(4, 20):
        number += 1
        assert number < 400, "transformers computes too few of these configs"
        config = random_config(rng, family, VISION.get(family))
        expected = written(tmp_path / str(number), config, number)
        if expected is None:
            continue
        valid += 1
        logits = logits_or_reason(tmp_path / str(number))
        if isinstance(logits, str):
            assert any(name in logits for name in field_names(config)), f"{logits}: {config}"
            continue
        assert (logits - expected).abs().max() < 1e-4, config
        if pool:
            by_kernels = native_logits_of(tmp_path / str(number), [60], torch.float32, pool)
            assert (by_kernels - expected).abs().max() < 1e-4 * expected.std().clamp(min=1), config
            parts = native_logits_of(tmp_path / str(number), [13, 1, 1, 30, 15], torch.float32, pool)
            assert torch.equal(parts, by_kernels), config
        equal += 1
    assert equal
