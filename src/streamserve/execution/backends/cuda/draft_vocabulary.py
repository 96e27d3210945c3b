"""Adapt a draft model on a device to a target whose embedding has a different number of padding rows.

drafters/common_vocabulary.py adapts the passes of a model on the host. On a device, passes read draft tokens
and the target's tokens that the host does not know, so the matrices themselves get the target's rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from streamserve.execution.backends.cuda.linear import WideLinear
from streamserve.execution.drafters.common_vocabulary import OTHER
from streamserve.execution.model.forward import Model


def with_vocabulary(draft: Model, rows: int) -> Model:
    """Return the model `draft`, whose head is not quantized, with the vocabulary of a target with `rows`
    tokens. It shares all weights that need not be extended."""
    if draft.spec.vocab_size == rows:
        return draft
    assert isinstance(draft.head, WideLinear)
    embedding = _at_rows(draft.embedding, rows)
    head = embedding if draft.spec.tied_embeddings else _at_rows(draft.head.weight, rows)
    known = min(rows, draft.spec.vocab_size)
    spec = replace(draft.spec, vocab_size=rows)
    return Model(spec, embedding, draft.layers, draft.final_norm, WideLinear(head, known))


def _at_rows(matrix: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows of `matrix` [rows of the draft, hidden]. Rows that it does not have are
    copies of the row of the token OTHER."""
    missing = rows - len(matrix)
    return torch.cat([matrix, matrix[OTHER].expand(missing, -1)]) if missing > 0 else matrix[:rows]
