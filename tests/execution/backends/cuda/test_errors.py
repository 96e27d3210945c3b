"""A device without enough memory is reported in one line at the start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.execution.loading.device import DeviceBackend
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError


def test_memory_that_does_not_suffice_is_one_line_that_says_what_to_do(
    shared_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **fields: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total ...")

    config = ModelConfig(path=str(shared_checkpoint()), backend="device", num_blocks=40)
    for part in ("model", "cache", "runner"):
        with monkeypatch.context() as patch:
            patch.setattr(DeviceBackend, part, full)
            with pytest.raises(CheckpointError) as error:
                load(config)
        assert "MiB are free" in str(error.value)
        assert "--kv-cache-bytes" in str(error.value)
        assert "\n" not in str(error.value)
