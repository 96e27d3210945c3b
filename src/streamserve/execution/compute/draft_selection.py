"""Select draft tokens from a draft model's logits: the tokens that the target samples if its logits agree.

* Greedy requests: the likeliest tokens. The feature is the softmax value.
* Sampled requests: the tokens with the highest perturbed score, log p / T + G, under the noise that the
  target will use (compute/noise.py). The feature is the gap to the best other token, because the token's
  probability says almost nothing about acceptance.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.compute.noise import gumbel
from streamserve.execution.compute.rejection import DRAFTING, draw, uniforms
from streamserve.execution.compute.sampling import Scores, filtered_ids, finite_rows
from streamserve.protocol.sampling import SamplingParams

CANDIDATES = 32
"""Number of likeliest tokens of a row that are considered under noise: other tokens hardly ever win."""

NO_ADJUSTMENTS: Mapping[int, Scores] = {}

FIRST_DRAW, LATER_DRAW = 0.7, 0.3
"""Features of draft tokens that are drawn at random: for a node's first draw, and for its later draws."""

ScoredToken = tuple[int, float]
"""A draft token and its feature in (0, 1)."""


class DraftSelector(Protocol):
    """Selects draft tokens as `select_draft_tokens` does."""

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        outputs: Sequence[int],
        count: int,
        adjusted: Mapping[int, Scores] = NO_ADJUSTMENTS,
    ) -> list[list[ScoredToken]]: ...


def select_draft_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    choices: Sequence[int],
    outputs: Sequence[int],
    count: int,
    adjusted: Mapping[int, Scores] = NO_ADJUSTMENTS,
) -> list[list[ScoredToken]]:
    """Return up to `count` draft tokens for each row of `logits` [rows, vocabulary], the best first. Row i is
    for output number `outputs[i]` of `choices[i]`. `adjusted[i]` replaces the logits of row i. A row with NaN
    or an infinity gets no draft tokens."""
    finite = finite_rows(logits)
    scores = logits.float().clone() if adjusted else logits.float()
    for row, replacement in adjusted.items():
        scores[row] = torch.from_numpy(replacement).to(scores)
    drafted: list[list[ScoredToken]] = [[] for _ in params]
    greedy = [row for row, row_params in enumerate(params) if row_params.greedy]
    if greedy:
        part = scores if len(greedy) == len(params) else scores[greedy]
        for row, tokens in zip(greedy, _likeliest(part, count), strict=True):
            drafted[row] = tokens
    drawn = [row for row, row_params in enumerate(params) if not row_params.greedy]
    if drawn:
        noisy = _perturbed(
            scores if len(drawn) == len(params) else scores[drawn],
            [params[row] for row in drawn],
            [choices[row] for row in drawn],
            [outputs[row] for row in drawn],
            count,
        )
        for row, tokens in zip(drawn, noisy, strict=True):
            drafted[row] = tokens
    return [tokens if row_is_finite else [] for tokens, row_is_finite in zip(drafted, finite, strict=True)]


def sample_draft_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    choices: Sequence[int],
    outputs: Sequence[int],
    count: int,
    adjusted: Mapping[int, Scores] = NO_ADJUSTMENTS,
) -> list[tuple[list[ScoredToken], NDArray[np.float32]]]:
    """Return, for each row, `count` independent draws from its processed distribution, and the distribution.
    Features only distinguish the first draw from later ones: rejection sampling requires that they do not
    depend on the tokens."""
    scores = logits.float().double().cpu().numpy()
    drafted = []
    finite = finite_rows(logits)
    for row, row_params in enumerate(params):
        if not finite[row]:
            drafted.append((list[ScoredToken](), np.zeros(scores.shape[1], np.float32)))
            continue
        probabilities = _distribution(adjusted.get(row, scores[row]), row_params)
        numbers = uniforms(row_params.seed or 0, choices[row], outputs[row], DRAFTING, count)
        tokens = [draw(probabilities, number) for number in numbers]
        scored = [(token, FIRST_DRAW if rank == 0 else LATER_DRAW) for rank, token in enumerate(tokens)]
        drafted.append((scored, probabilities.astype(np.float32)))
    return drafted


def _distribution(scores: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Return the distribution that a request's tokens are drawn from."""
    scaled = scores / params.temperature
    ids = filtered_ids(scaled, params)
    probabilities = np.zeros(len(scaled))
    probabilities[ids] = np.exp(scaled[ids] - scaled.max())
    # Rounded to float32, because the acceptance test divides by these numbers: a token that is rounded to
    # zero must not be drawn.
    rounded: NDArray[np.float64] = (probabilities / probabilities.sum()).astype(np.float32).astype(np.float64)
    return rounded


def _likeliest(scores: Tensor, count: int) -> list[list[ScoredToken]]:
    if count == 1:
        top, ids = scores.max(-1, keepdim=True)
    else:
        top, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    probabilities = (top - scores.logsumexp(-1, keepdim=True)).exp()
    return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), probabilities.tolist(), strict=True)]


def _perturbed(
    scores: Tensor,
    params: Sequence[SamplingParams],
    choices: Sequence[int],
    outputs: Sequence[int],
    count: int,
) -> list[list[ScoredToken]]:
    temperatures = torch.tensor([row_params.temperature for row_params in params], device=scores.device)
    scaled = scores / temperatures.unsqueeze(1)
    total = scaled.logsumexp(-1, keepdim=True)
    top, ids = scaled.topk(min(CANDIDATES, scores.shape[-1]), dim=-1)
    logs, tokens = (top - total).double().cpu().numpy(), ids.cpu().numpy()
    allowed = _allowed(logs, params)
    rows, size = logs.shape
    noise = gumbel(
        np.repeat(np.array([row_params.seed or 0 for row_params in params], dtype=np.uint64), size),
        np.repeat(np.array(choices, dtype=np.uint64), size),
        np.repeat(np.array(outputs, dtype=np.uint64), size),
        tokens.ravel(),
    ).reshape(rows, size)
    perturbed = np.where(allowed, logs + noise, -np.inf)
    order = np.argsort(-perturbed, axis=1)[:, : count + 1]
    ranked = np.take_along_axis(perturbed, order, axis=1)
    chosen = np.take_along_axis(tokens, order, axis=1)
    return [_with_gaps(a, b, count) for a, b in zip(chosen.tolist(), ranked.tolist(), strict=True)]


def _with_gaps(tokens: list[int], scores: list[float], count: int) -> list[ScoredToken]:
    """Return the tokens with their features: the logistic function of the gap to the best other score, which
    is above one half only for the best token."""
    scored: list[ScoredToken] = []
    for rank, (token, score) in enumerate(zip(tokens[:count], scores, strict=False)):
        if score == -np.inf:
            break
        other = scores[1 if rank == 0 else 0] if len(scores) > 1 else -np.inf
        scored.append((token, 1.0 / (1.0 + float(np.exp(min(other - score, 700.0))))))
    return scored


def _allowed(logs: NDArray[np.float64], params: Sequence[SamplingParams]) -> NDArray[np.bool_]:
    """Return whether each candidate passes min_p, top_k and top_p. The log-probabilities `logs` [rows,
    candidates] fall along a row."""
    allowed = np.ones(logs.shape, dtype=bool)
    for row, row_params in enumerate(params):
        if row_params.min_p > 0.0:
            allowed[row] &= logs[row] >= logs[row, 0] + np.log(row_params.min_p)
        if row_params.top_k > 0:
            allowed[row, row_params.top_k :] = False
        if row_params.top_p < 1.0:
            before = np.concatenate(([0.0], np.cumsum(np.exp(logs[row]))[:-1]))
            allowed[row] &= before < row_params.top_p
    return allowed
