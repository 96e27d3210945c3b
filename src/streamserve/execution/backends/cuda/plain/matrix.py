"""Products with packed weights, of all rows or of the experts that each row chose, in plain torch."""

import torch
from torch import Tensor

from streamserve.execution.backends.cuda.packing import PackedWeight, unpack
from streamserve.execution.backends.cuda.routing import Routing


def prepare(device: torch.device) -> None:
    """Allocate memory that products share. Plain torch needs none."""


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `x` [rows, in] times the transposed `weight`, plus `bias` [out], in `dtype`. Sums are in
    float32."""
    y = x.float() @ unpack(weight).T
    return (y if bias is None else y + bias.float()).to(dtype)


def multiply_routed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, routing: Routing, shared: int
) -> Tensor:
    """Return the product of each pair of a row and an expert, [pairs, out] in the dtype of `x`. Pair p
    multiplies the input x[p // shared] by the weight of its expert, and adds the expert's `bias` [experts,
    out]."""
    out = x.new_empty(len(routing.order), weight.outputs)
    floats = unpack(weight)
    tiles = zip(*(values.tolist() for values in routing[1:]), strict=True)
    for expert, first, count in tiles:
        pairs = routing.order[first : first + count].long()
        y = x[pairs // shared].float() @ floats[expert].T if count else out[:0].float()
        out[pairs] = (y if bias is None else y + bias[expert].float()).to(x.dtype)
    return out


def combine_experts(outputs: Tensor, shares: Tensor, shared: Tensor | None) -> Tensor:
    """Return the weighted sums [rows, n] of the `outputs` [rows x chosen, n] of each row's experts. `shares`
    [rows, chosen] (float32) are the weights. Sums are in float32, in order of the experts. `shared` [rows,
    n]: the output of the shared expert, which is added last, with the weights in the last column of
    `shares`."""
    rows = len(shares)
    parts = list(outputs.view(rows, -1, outputs.shape[-1]).unbind(1))
    parts += [] if shared is None else [shared]
    total = parts[0].float() * shares[:, :1]
    for rank, part in enumerate(parts[1:], 1):
        total = total + part.float() * shares[:, rank, None]
    return total.to(outputs.dtype)
