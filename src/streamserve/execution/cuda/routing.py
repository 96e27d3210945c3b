"""The pairs of rows and the experts that they chose, sorted by expert: computed on the device, so that the
host need not wait for the choice."""

from typing import NamedTuple

import torch
from torch import Tensor

TILES = (16, 64)
"""Pairs of one expert that are multiplied at once: many where an expert has many."""


class Routing(NamedTuple):
    """Pairs of rows and experts, row by row (int32). `order` [pairs]: the pairs' numbers, sorted by expert.
    Tile t multiplies the pairs `order[firsts[t]]` up to `counts[t]` further ones by the weight of
    `experts[t]`; tiles at the end may have no pairs."""

    order: Tensor
    experts: Tensor
    firsts: Tensor
    counts: Tensor


def tile_of(pairs: int, experts: int) -> int:
    """Return the size of a tile for so many pairs in all."""
    return TILES[pairs > TILES[1] // 2 * experts]


def route(chosen: Tensor, experts: int) -> Routing:
    """Return the tiles for the `chosen` experts [rows, each] of `experts`. Their number depends on the shape
    of `chosen` alone."""
    flat = chosen.flatten()
    pairs, device = len(flat), flat.device
    tile = tile_of(pairs, experts)
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + tile - 1) // tile
    tile_ends, pair_ends = tiles.cumsum(0), counts.cumsum(0)
    number = torch.arange(min(pairs, pairs // tile + experts), device=device)
    found = torch.searchsorted(tile_ends, number, right=True)
    expert = found.clamp(max=experts - 1)
    within = (number - tile_ends[expert] + tiles[expert]) * tile
    count = torch.where(found < experts, counts[expert] - within, 0).clamp(0, tile)
    first = torch.where(count > 0, pair_ends[expert] - counts[expert] + within, 0)
    return Routing(order.int(), expert.int(), first.int(), count.int())
