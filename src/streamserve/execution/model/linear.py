"""Linear maps. Each owns its weight in the layout of its kernel, packed once at loading."""

from typing import Literal, Protocol

import torch
from torch import Tensor

Format = Literal["f32", "bf16", "int8", "int4", "fp8", "mxfp4", "iq4"]
"""Storage format of a packed weight: its dtype, or a quantized format (quantization.py)."""

_FORMATS: dict[torch.dtype, Format] = {torch.float32: "f32", torch.bfloat16: "bf16"}


class LinearMap(Protocol):
    """The interface of a linear map, independent of how its weight is stored."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Map `x` [rows, in] to [rows, out]."""


class Linear:
    """`y = x Wᵀ + b` for `x` [rows, in] of the weight's dtype. Takes ownership of `weight` [out, in] and
    `bias` [out].

    On CPUs with bf16 products, a bf16 weight is packed for oneDNN, because `torch.nn.functional.linear` packs
    a plain one again at every call. A float32 weight stays plain, and may share its tensor (tied embeddings).
    The last bits of a row's result may depend on the number of rows multiplied with it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.format = _FORMATS[weight.dtype]
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = packs(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return torch.nn.functional.linear(x, self.weight, self.bias)


def packs(dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` are packed: bf16, if this CPU and torch version support it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return dtype == torch.bfloat16 and supported is not None and bool(supported())
