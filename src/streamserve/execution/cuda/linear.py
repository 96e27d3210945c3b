"""Linear maps on a device."""

from types import ModuleType

import torch
from torch import Tensor

from streamserve.execution.cuda.packing import Kind, PackedWeight, pack
from streamserve.execution.quantization import QuantizedWeight


class TorchLinear:
    """`y = x Wᵀ + b` for `x` [rows, in] of the dtype of `weight` [out, in], by the device's own library. The
    last bits of a row's result may depend on how many rows are multiplied with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    @property
    def packed(self) -> PackedWeight:
        """The weight as the experts' kernels read it."""
        return PackedWeight(Kind.FLOATS, self.weight, self.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class WideLinear:
    """`y = x Wᵀ` in float32, for the map to the logits, which are not rounded to the model's dtype: `x`
    [rows, in] of the dtype of `weight` [out, in]. On the CPU the weight is widened at every call."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y: in `out`, if that is given and the library can write there."""
        if x.dtype == torch.float32:
            return torch.nn.functional.linear(x, self.weight)
        if x.device.type == "cpu":
            return torch.nn.functional.linear(x.float(), self.weight.float())
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)


class QuantizedLinear:
    """`y = x Wᵀ + b` for `x` [rows, in] of any dtype and a quantized `weight` [out, in], which is multiplied
    as it is stored, by `matrix.multiply` (operations.py). `wide`: y is float32."""

    def __init__(
        self,
        matrix: ModuleType,
        device: torch.device,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        wide: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.numbers.shape
        self.packed = pack(weight, device)
        self.bias = bias
        self._matrix = matrix
        self._wide = wide
        matrix.prepare(device)

    def __call__(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self._wide else x.dtype
        out: Tensor = self._matrix.multiply(x, self.packed, self.bias, dtype)
        return out
