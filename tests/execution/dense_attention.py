"""Attention computed densely, the reference of the kernels."""

import torch

from streamserve.execution.model.layout import SpanRows


def visible_slots(part: SpanRows, row: int, window: int | None) -> list[int]:
    """Return the sequence's slot numbers that a query row sees, as the contract defines them."""
    span = part.span
    linear = span.start + len(span.tokens)
    if row < len(span.tokens):
        slots = list(range(span.start + row + 1))
        positions = slots
    else:
        path = span.tree.path(row - len(span.tokens) + 1)[1:]
        slots = [*range(linear), *(linear - 1 + node for node in path)]
        positions = [*range(linear), *(linear + depth for depth in range(len(path)))]
    latest = positions[-1]
    return [s for s, p in zip(slots, positions, strict=True) if window is None or p > latest - window]


def dense(
    part: SpanRows,
    row: int,
    q: torch.Tensor,
    layer: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax attention of one query row [heads, dim] in float64, one head at a time. `sinks` [heads]
    are additional scores without values."""
    block_size = layer.shape[3]
    slots = visible_slots(part, row, window)
    blocks = [part.span.blocks[slot // block_size] for slot in slots]
    kv = torch.stack([layer[b, :, :, s % block_size] for b, s in zip(blocks, slots, strict=True)], dim=2)
    keys, values = kv.double()
    group = len(q) // len(keys)
    heads = []
    for head, query in enumerate(q.double()):
        scores = keys[head // group] @ query * len(query) ** -0.5
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1].double()])
        weights = torch.softmax(scores, dim=0)[: len(slots)]
        heads.append(weights @ values[head // group])
    return torch.stack(heads)
