"""Sort pairs of a row and an expert that it chose by expert, on the device, so that the host need not wait
for the choice."""

from typing import NamedTuple

import torch
from torch import Tensor

TILES = (16, 64)
"""Sizes of a tile, the pairs of one expert that are multiplied together. Experts with many pairs have large
tiles."""


class Routing(NamedTuple):
    """The tiles of a step's pairs of row and expert (int32). Pairs are numbered row by row. `order` [pairs]
    has the pairs' numbers, sorted by expert. Tile t multiplies the `counts[t]` pairs from order[firsts[t]] on
    by the weight of `experts[t]`; tiles at the end may have no pairs."""

    order: Tensor
    experts: Tensor
    firsts: Tensor
    counts: Tensor


def tile_of(pairs: int, experts: int) -> int:
    """Return the size of a tile for `pairs` pairs with `experts` experts."""
    return TILES[pairs > TILES[1] // 2 * experts]


def route(chosen: Tensor, experts: int) -> Routing:
    """Return the tiles for the `chosen` experts [rows, experts a row], out of `experts`. The number of tiles
    depends only on the shape of `chosen`, so that the pass can be captured: it suffices in the worst case."""
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
