"""Pooling: one vector for a request, from the hidden states after the last norm or from logits.

A vector's bits depend neither on the division of its prompt into chunks nor on other requests in the steps:
rows do not depend on each other, and a mean adds them one by one, in order of position, in float64.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from streamserve.execution.compute.branches import ActiveSequence
from streamserve.execution.compute.running_sum import RunningSum
from streamserve.execution.model.layout import SpanRows


def pool(
    parts: Sequence[SpanRows],
    sequences: Mapping[int, ActiveSequence],
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> dict[int, bytes]:
    """Return the vectors of the sequences in `parts` whose prompts end in this step, by sequence id. A vector
    has float32 numbers; it is empty if one of them is not finite. All sequences of `parts` must have
    `pooling`. `hidden` [rows, hidden] has the hidden states of the whole step; for mean pooling the rows of
    `parts` are added to their sequences' sums."""
    for part in parts:
        _add_up(sequences[part.span.sequence], part, hidden)
    ended = [part for part in parts if part.span.tree]
    rows = [part.root for part in ended if _tokens(sequences[part.span.sequence])]
    scores = iter(logits(hidden[rows])) if rows else iter(())
    vectors = {}
    for part in ended:
        sequence = sequences[part.span.sequence]
        if tokens := _tokens(sequence):
            vector = next(scores)[tokens]
        else:
            vector = sequence.sum.mean() if sequence.sum else hidden[part.root]
        vectors[part.span.sequence] = _bytes(vector)
    return vectors


def _tokens(sequence: ActiveSequence) -> list[int]:
    """Return the tokens whose logits are the request's vector; empty if it is made of hidden states."""
    return list(sequence.params.pooling.tokens) if sequence.params.pooling else []


def _add_up(sequence: ActiveSequence, part: SpanRows, hidden: Tensor) -> None:
    if sequence.params.pooling and sequence.params.pooling.kind == "mean":
        sequence.sum = sequence.sum or RunningSum.of(hidden.shape[1])
        sequence.sum.add(part.span.start, hidden[part.offset : part.root + 1])


def _bytes(vector: Tensor) -> bytes:
    finite = bool(torch.isfinite(vector).all())
    return vector.float().numpy().astype("<f4").tobytes() if finite else b""
