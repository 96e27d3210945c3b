"""Linear maps on a device."""

import torch
from torch import Tensor


class TorchLinear:
    """`y = x Wᵀ + b` for `x` [rows, in] of the dtype of `weight` [out, in], by the device's own library. The
    last bits of a row's result may depend on how many rows are multiplied with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)
