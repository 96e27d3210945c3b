"""Which instructions compute with which numbers."""

import torch

from streamserve.execution.native.library import Path

EVERY_PATH = [(path, torch.bfloat16) for path in Path] + [
    (path, torch.float32) for path in (Path.PORTABLE, Path.AVX2, Path.AVX512)
]
