"""The choice of tokens by the host's sampling (execution/compute/sampling.py), from packed draws."""

import numpy as np
import torch
from torch import Tensor

from streamserve.execution.compute.noise import gumbel
from streamserve.execution.compute.sampling import NOT_FINITE, filtered_ids
from streamserve.protocol.sampling import SamplingParams


def choose_tokens(logits: Tensor, draws: Tensor, out: Tensor) -> None:
    """Choose a token from each row of `logits` [rows, vocabulary] by the same row of `draws` (cuda/draws.py),
    and write it to `out` [rows]; NOT_FINITE if the logits are not finite."""
    finite = torch.isfinite(logits).all(-1).tolist()
    packed = draws.contiguous().numpy()
    for row, is_finite in enumerate(finite):
        out[row] = _choose(logits[row], packed[row]) if is_finite else NOT_FINITE


def _choose(logits: Tensor, packed: np.ndarray) -> int:
    temperature, top_p, least = packed[:6].view(np.float64).tolist()
    seed = int(packed[6:8].view(np.uint64)[0])
    choice, output, top_k, _ = packed[8:12].tolist()
    if temperature == 0.0:
        return int(logits.argmax())
    scores = logits.double().numpy() / temperature
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=float(np.exp(least)))
    ids = filtered_ids(scores, params)
    return int(ids[(scores[ids] + gumbel(seed, choice & 0xFFFFFFFF, output & 0xFFFFFFFF, ids)).argmax()])
