"""Products with packed weights, and those of the experts that each row chose, in plain torch."""

import torch
from torch import Tensor

from streamserve.execution.cuda.packing import PackedWeight, unpack
from streamserve.execution.cuda.routing import Routing


def prepare(device: torch.device) -> None:
    """Allocate what products share: nothing here."""


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `x` [rows, in] times the transposed `weight`, with `bias` [out], in `dtype`: added up in
    float32."""
    y = x.float() @ unpack(weight).T
    return (y if bias is None else y + bias.float()).to(dtype)


def multiply_routed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, routing: Routing, shared: int
) -> Tensor:
    """Return the product of each pair of a row and an expert [pairs, out], in the dtype of `x`. Pair p has
    the input x[p // shared] and the weight of its expert, with the expert's `bias` [experts, out]."""
    out = x.new_empty(len(routing.order), weight.outputs)
    floats = unpack(weight)
    tiles = zip(*(values.tolist() for values in routing[1:]), strict=True)
    for expert, first, count in tiles:
        pairs = routing.order[first : first + count].long()
        y = x[pairs // shared].float() @ floats[expert].T if count else out[:0].float()
        out[pairs] = (y if bias is None else y + bias[expert].float()).to(x.dtype)
    return out


def combine_experts(outputs: Tensor, shares: Tensor, shared: Tensor | None) -> Tensor:
    """Return the sums [rows, n] of `outputs` [rows x chosen, n] of each row's experts times `shares` [rows,
    chosen] (float32), in order, in float32. An expert of all rows, `shared` [rows, n], is the last: its share
    follows the others'."""
    rows = len(shares)
    parts = list(outputs.view(rows, -1, outputs.shape[-1]).unbind(1))
    parts += [] if shared is None else [shared]
    total = parts[0].float() * shares[:, :1]
    for rank, part in enumerate(parts[1:], 1):
        total = total + part.float() * shares[:, rank, None]
    return total.to(outputs.dtype)
