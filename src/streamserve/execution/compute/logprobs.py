"""Log-probabilities of the model's raw distribution, in float32, for requests that ask for them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.compute.sampling import highest
from streamserve.protocol.messages import LikelyToken, PromptLogprob

_ROWS = 32  # rows converted at a time, so that float32 [rows, vocabulary] stays small


def token_logprobs(
    logits: Callable[[slice], Tensor], tokens: Sequence[int], counts: Sequence[int]
) -> list[PromptLogprob]:
    """Return, for each row i of the logits, the log-probability and rank of `tokens[i]` and the `counts[i]`
    most likely tokens. Among equal tokens the lower id comes first. `logits(rows)` returns a slice of the
    logits [rows, vocabulary]."""
    entries = []
    for start in range(0, len(tokens), _ROWS):
        part = slice(start, min(start + _ROWS, len(tokens)))
        table = torch.log_softmax(logits(part).float(), dim=-1).cpu().numpy()
        entries += [_entry(*row) for row in zip(table, tokens[part], counts[part], strict=True)]
    return entries


def _entry(logprobs: NDArray[np.float32], token: int, count: int) -> PromptLogprob:
    top = [LikelyToken(int(other), float(logprobs[other])) for other in highest(logprobs, count)]
    rank = int((logprobs > logprobs[token]).sum()) + 1
    return PromptLogprob(token, float(logprobs[token]), rank, top)
