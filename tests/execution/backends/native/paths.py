"""The instructions of each kernel path, and the number formats that it computes with."""

import pytest
import torch

from streamserve.execution.backends.native.library import Path
from streamserve.protocol.config import KernelPath

EVERY_PATH = [(path, torch.bfloat16) for path in Path] + [
    (path, torch.float32) for path in (Path.PORTABLE, Path.AVX2, Path.AVX512)
]


def name_of(path: Path, dtype: torch.dtype) -> str:
    """Return the name of a path with a number format, as lists of skipped tests show it."""
    return f"{path.name} for {str(dtype).removeprefix('torch.')}"


def repeated(item: pytest.Item) -> KernelPath | None:
    """Return the lesser processor with whose kernels a test is repeated; None for the test itself
    (conftest.py)."""
    bound = item.callspec.params.get("pool", "auto") if hasattr(item, "callspec") else "auto"
    return None if bound == "auto" else bound
