"""Mixed precision, where the processor gains by it."""

from __future__ import annotations

import torch


def compute_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it. Elsewhere oneDNN emulates it, at half the rate of float32
    or at a hundredth."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def mixed_precision() -> torch.autocast:
    """Matrix products in bfloat16 inside this context, or as they are where that is slower."""
    return torch.autocast("cpu", torch.bfloat16, enabled=compute_dtype() is torch.bfloat16)
