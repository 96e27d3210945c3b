"""Mixed precision, where the processor gains by it."""

from __future__ import annotations

import torch


def compute_dtype() -> torch.dtype:
    """bfloat16 where oneDNN has kernels for it; elsewhere it would be a hundred times slower than float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def mixed_precision() -> torch.autocast:
    """Matrix products in bfloat16 inside this context, or as they are where that is slower."""
    return torch.autocast("cpu", torch.bfloat16, enabled=compute_dtype() is torch.bfloat16)
