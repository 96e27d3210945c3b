"""Log-probabilities for requests that ask for them: of the model's raw distribution, in float32."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.sampling import highest
from streamserve.protocol.messages import PromptLogprob, TopLogprob

_ROWS = 32  # rows at a time: only a slice of [rows, vocabulary] in float32 is in memory


def token_logprobs(
    logits: Callable[[slice], Tensor], tokens: Sequence[int], counts: Sequence[int]
) -> list[PromptLogprob]:
    """Return for row i of the logits the log-probability and rank of `tokens[i]` and the `counts[i]` most
    likely tokens, of equals the lower id first. `logits(rows)` returns a slice of them [rows, vocabulary]."""
    entries = []
    for start in range(0, len(tokens), _ROWS):
        part = slice(start, min(start + _ROWS, len(tokens)))
        table = torch.log_softmax(logits(part).float(), dim=-1).cpu().numpy()
        entries += [_entry(*row) for row in zip(table, tokens[part], counts[part], strict=True)]
    return entries


def _entry(logprobs: NDArray[np.float32], token: int, count: int) -> PromptLogprob:
    top = [TopLogprob(int(other), float(logprobs[other])) for other in highest(logprobs, count)]
    rank = int((logprobs > logprobs[token]).sum()) + 1
    return PromptLogprob(token, float(logprobs[token]), rank, top)
