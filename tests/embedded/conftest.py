"""Makes the training packages in `packaged_model` importable, and keeps the tests small."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaged_model"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny models run fastest on it, and the other processors stay free for other
    programs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
