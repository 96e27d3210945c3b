"""Load a GGUF file; return its logits, or why it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.contracts.plan import Span
from streamserve.execution.loading.load import load, make_attention
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.layout import lay_out
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS
from tests.execution.variants import TEXT

Shared = Callable[..., Path]
BLOCKS = [11, 3, 5, 15, 0, 1, 9, 2, 14, 4, 6, 13, 12, 7, 8]


def config(path: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(path), threads=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **fields)


def refusal(path: Path, **fields: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        load(config(path, **fields))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@torch.inference_mode()
def logits_of(loaded: Loaded) -> torch.Tensor:
    """Return the logits [60, vocabulary] for TEXT."""
    attention = make_attention(loaded.cache, loaded.model.spec, loaded.pool)
    layout = lay_out([Span(0, 0, TEXT[0].tolist(), BLOCKS)], BLOCK_SIZE)
    attention.plan(layout)
    tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
    return loaded.model.logits(loaded.model.forward(tokens, positions, attention)).float()
