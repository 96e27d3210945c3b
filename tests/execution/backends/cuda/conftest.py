"""Kernels run on the GPU if there is one; otherwise on the CPU, in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device on which kernels run: the GPU, or the CPU for Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
