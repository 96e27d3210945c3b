"""Pooling: one vector for a request, from the hidden states after the last norm or from logits.

A vector has the same bits however a prompt is divided into chunks and whatever else is in its steps: rows do
not depend on each other, and a mean adds them one by one, in the order of their positions, in float64.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from streamserve.execution.branches import ActiveSequence
from streamserve.execution.layout import SpanRows
from streamserve.execution.running_sum import RunningSum


def pool(
    parts: Sequence[SpanRows],
    sequences: Mapping[int, ActiveSequence],
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> dict[int, bytes]:
    """Return the vectors of the sequences among `parts`, all with `pooling`, whose prompts end in this step,
    by the sequences' ids: float32 numbers, none where any is not finite. `hidden` [rows, hidden] are the
    step's hidden states; those of prompts whose mean is asked for are added to their sums."""
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
    """Return the tokens whose logits a request asks for."""
    return list(sequence.params.pooling.tokens) if sequence.params.pooling else []


def _add_up(sequence: ActiveSequence, part: SpanRows, hidden: Tensor) -> None:
    if sequence.params.pooling and sequence.params.pooling.kind == "mean":
        sequence.sum = sequence.sum or RunningSum.of(hidden.shape[1])
        sequence.sum.add(part.span.start, hidden[part.offset : part.root + 1])


def _bytes(vector: Tensor) -> bytes:
    finite = bool(torch.isfinite(vector).all())
    return vector.float().numpy().astype("<f4").tobytes() if finite else b""
