"""Linear maps on a device."""

from types import ModuleType

import torch
from torch import Tensor

from streamserve.execution.backends.cuda.packing import Kind, PackedWeight, pack
from streamserve.execution.drafters.common_vocabulary import UNLIKELY
from streamserve.execution.formats.quantization import QuantizedWeight


class TorchLinear:
    """`y = x Wᵀ + b` for `x` [rows, in] of the dtype of `weight` [out, in], by the device's library. The last
    bits of a row's result may depend on the number of rows multiplied with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    @property
    def packed(self) -> PackedWeight:
        """The weight in the form that the experts' kernels read."""
        return PackedWeight(Kind.FLOATS, self.weight, self.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class WideLinear:
    """`y = x Wᵀ` in float32, for `x` [rows, in] of the dtype of `weight` [out, in]. It maps to the logits,
    which are not rounded to the model's dtype. On the CPU the weight is converted at every call. `known`: the
    number of tokens that the model has; the logits of later ones are UNLIKELY."""

    def __init__(self, weight: Tensor, known: int | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self._known = self.out_features if known is None else known

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product y. It is in `out` if `out` is given and the library can write to it."""
        product = self._multiply(x, out)
        if self._known < self.out_features:
            product[:, self._known :].fill_(UNLIKELY)
        return product

    def _multiply(self, x: Tensor, out: Tensor | None) -> Tensor:
        if x.dtype == torch.float32:
            return torch.nn.functional.linear(x, self.weight)
        if x.device.type == "cpu":
            return torch.nn.functional.linear(x.float(), self.weight.float())
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)


class QuantizedLinear:
    """`y = x Wᵀ + b` for `x` [rows, in] of any dtype and a quantized `weight` [out, in]. `matrix.multiply`
    (operations.py) multiplies it in its packed form. `wide`: y is float32."""

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
