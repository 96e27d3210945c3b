"""The map from hidden states to logits, which are not rounded to the model's dtype."""

import torch
from torch import Tensor


class WideLinear:
    """`y = x Wᵀ` in float32 for `x` [rows, in] of the dtype of `weight` [out, in]. On the CPU the weight is
    widened at every call. Raises ValueError for a bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if bias is not None:
            raise ValueError("a head has no bias")
        self.out_features, self.in_features = weight.shape
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return torch.nn.functional.linear(x, self.weight)
        if x.device.type == "cpu":
            return torch.nn.functional.linear(x.float(), self.weight.float())
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
