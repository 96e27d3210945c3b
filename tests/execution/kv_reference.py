"""Quantized vectors of the KV cache, computed with numpy."""

import numpy as np
import torch
from numpy.typing import NDArray

SMALLEST = float(np.finfo(np.float32).tiny)


def reference(vector: torch.Tensor) -> tuple[NDArray[np.int8], np.float32]:
    """Return the integers and the scale of one vector [dim]."""
    numbers = vector.float().numpy()
    if not np.isfinite(numbers).all():
        return np.zeros(len(numbers), np.int8), np.float32(np.nan)
    scale = np.abs(numbers).max() / np.float32(127)
    if scale < SMALLEST:
        return np.zeros(len(numbers), np.int8), np.float32(0)
    return np.rint(numbers / scale).astype(np.int8), scale


def reference_bytes(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., dim] as int8 [..., dim + 4]."""
    rows = [reference(vector) for vector in vectors.reshape(-1, vectors.shape[-1])]
    stored = [np.concatenate((integers, scale[None].view(np.int8))) for integers, scale in rows]
    return torch.from_numpy(np.stack(stored)).view(*vectors.shape[:-1], -1)


def reference_numbers(vectors: torch.Tensor) -> torch.Tensor:
    """Return the numbers that are read after `vectors` [..., dim] were written, in the vectors' dtype."""
    rows = [reference(vector) for vector in vectors.reshape(-1, vectors.shape[-1])]
    numbers = np.stack([integers.astype(np.float32) * scale for integers, scale in rows])
    return torch.from_numpy(numbers).to(vectors.dtype).view(vectors.shape)
