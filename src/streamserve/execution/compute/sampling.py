"""Sampling: process the logits in the usual order, then take the best token under Gumbel noise.

First come logit_bias, allowed_token_ids, the tokens forbidden by min_tokens, and the penalties. A greedy
request then takes the best token, within its grammar if it has one. For other requests, temperature, min_p,
top_k and top_p follow, and the token with the highest score plus noise is taken (the Gumbel-max trick). That
is an exact sample of the softmax over the remaining tokens. Every row is processed independently, in float64.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.compute.noise import HIGHEST, LOWEST, gumbel
from streamserve.protocol.sampling import SamplingParams

Scores = NDArray[np.float64]
Ids = NDArray[np.int64]

NOT_FINITE = -1
"""The result for a row whose raw logits contain NaN or an infinity: no token."""


class NotFiniteError(ArithmeticError):
    """The model's raw logits contain NaN or an infinity."""


def finite_rows(values: Tensor) -> NDArray[np.bool_]:
    """Return, for each row of `values` [rows, columns], whether it contains neither NaN nor an infinity. The
    sum of all values is checked first, because nearly always all are finite; then the sum of each row."""
    if math.isfinite(values.sum(dtype=torch.float32).item()):
        return np.ones(len(values), np.bool_)
    finite: NDArray[np.bool_] = torch.isfinite(values.sum(-1, dtype=torch.float32)).cpu().numpy()
    return finite


class Row(msgspec.Struct, frozen=True):
    """The inputs of choosing one token.

    * `logits`: the row of the logits.
    * `params`, `choice`: the request's parameters and output choice.
    * `prompt`: the distinct token ids of the prompt.
    * `outputs`: the outputs before this token, including the draft tokens on the row's path.
    * `allowed`: the grammar's mask at this position (execution/compute/grammar.py); None without a grammar.
    """

    logits: int
    params: SamplingParams
    choice: int
    prompt: Ids
    outputs: list[int]
    allowed: NDArray[np.uint8] | None = None

    def forbidden(self, eos_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that would end the text before `min_tokens`."""
        if len(self.outputs) >= self.params.min_tokens:
            return []
        return [*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos_token_ids)]


class Chooser(Protocol):
    """Chooses the tokens of all rows in one call, with the same result as a `Sampler` without a chooser.
    `adjusted[i]`, if not None, replaces the logits of `rows[i]` for the choice. The original logits are still
    checked for NaN and infinities."""

    def __call__(
        self, logits: Tensor, rows: Sequence[Row], adjusted: Sequence[Scores | None]
    ) -> list[int]: ...


class Sampler:
    """Samples from rows of one step's `logits` [rows, vocabulary], by `chooser` if there is one."""

    def __init__(self, logits: Tensor, eos_token_ids: Sequence[int], chooser: Chooser | None = None) -> None:
        self._logits = logits
        self._eos_token_ids = eos_token_ids
        self._chooser = chooser

    def sample(self, rows: Sequence[Row]) -> list[int]:
        """Return a token for each row, or NOT_FINITE if its raw logits are not finite. A row of the logits
        may occur more than once, with different choices."""
        if self._chooser is not None:
            adjusted = [self._scores(row) if self._adjusted(row) else None for row in rows]
            return self._chooser(self._logits, rows, adjusted)
        tokens = [NOT_FINITE] * len(rows)
        drawn: list[tuple[int, Ids, Scores]] = []
        for index, row in enumerate(rows):
            if not self._finite[row.logits]:
                continue
            if row.params.greedy and not self._adjusted(row):
                tokens[index] = self._best[row.logits]
                continue
            scores = self._scores(row)
            if row.params.greedy:
                tokens[index] = int(scores.argmax())
            else:
                scores /= row.params.temperature
                ids = filtered_ids(scores, row.params)
                drawn.append((index, ids, scores[ids]))
        for index, token in zip((index for index, _, _ in drawn), _draw(rows, drawn), strict=True):
            tokens[index] = token
        return tokens

    def distribution(self, row: Row) -> Scores:
        """Return the probabilities [vocabulary] that a sampled row's token is drawn from. Raises
        NotFiniteError if its raw logits are not finite."""
        if not self._finite[row.logits]:
            raise NotFiniteError
        scores = self._scores(row)
        scores /= row.params.temperature
        ids = filtered_ids(scores, row.params)
        probabilities = np.zeros(len(scores))
        probabilities[ids] = np.exp(scores[ids] - scores[ids].max())
        probabilities /= probabilities.sum()
        return probabilities

    def _scores(self, row: Row) -> Scores:
        """Return a row's logits after all processing before the temperature."""
        scores: Scores = self._logits[row.logits].double().numpy()
        adjust(scores, row, self._eos_token_ids)
        return scores

    def _adjusted(self, row: Row) -> bool:
        params = row.params
        if params.penalized or params.logit_bias or params.allowed_token_ids or row.allowed is not None:
            return True
        return bool(row.forbidden(self._eos_token_ids))

    @cached_property
    def _finite(self) -> NDArray[np.bool_]:
        return finite_rows(self._logits)

    @cached_property
    def _best(self) -> list[int]:
        """The best token of every row, among equal ones the lowest id. It is computed for all rows at once,
        for plain greedy decoding."""
        best: list[int] = self._logits.argmax(-1).tolist()
        return best


def adjust(scores: Scores, row: Row, eos_token_ids: Sequence[int]) -> None:
    """Apply all processing that may change the best token to `scores` [vocabulary], in place."""
    params = row.params
    if params.logit_bias:
        scores[list(params.logit_bias)] += list(params.logit_bias.values())
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        allowed_scores = scores[allowed]
        scores[:] = -np.inf
        scores[allowed] = allowed_scores
    if row.allowed is None:
        scores[row.forbidden(eos_token_ids)] = -np.inf
    else:
        _apply_grammar_mask(scores, row, eos_token_ids)
    if not params.penalized:
        return
    outputs, counts = np.unique(np.asarray(row.outputs, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(row.prompt, outputs)
        penalty = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    scores[outputs] -= params.frequency_penalty * counts + params.presence_penalty


def _apply_grammar_mask(scores: Scores, row: Row, eos_token_ids: Sequence[int]) -> None:
    """Mask the `scores` of tokens that the row's grammar does not allow, in place. Tokens that would end a
    text too early (min_tokens, ignore_eos) are masked too, unless the grammar allows no other tokens."""
    assert row.allowed is not None
    allowed = np.unpackbits(row.allowed, count=len(scores), bitorder="little").astype(bool)
    excluded = [*row.forbidden(eos_token_ids), *(eos_token_ids if row.params.ignore_eos else ())]
    preferred = allowed.copy()
    preferred[excluded] = False
    scores[~(preferred if preferred.any() else allowed)] = -np.inf


def filtered_ids(scores: Scores, params: SamplingParams) -> Ids:
    """Return the ids of the tokens that pass min_p, top_k and top_p, ascending, without tokens that cannot
    win under any noise. `scores` [vocabulary] are already divided by the temperature. Among equal scores the
    lower ids stay."""
    best = scores.max()
    if not np.isfinite(best):  # every token is forbidden: take the same token as a greedy request
        return np.array([scores.argmax()])
    ids: Ids = np.flatnonzero(scores > -np.inf)
    if params.min_p > 0.0:
        ids = ids[scores[ids] >= best + np.log(params.min_p)]
    if 0 < params.top_k < len(ids):
        ids = np.sort(ids[highest(scores[ids], params.top_k)])
    if params.top_p < 1.0:
        ids = ids[_nucleus(scores[ids], params.top_p)]
    ids = ids[scores[ids] >= best - (HIGHEST - LOWEST)]
    return ids


def _nucleus(scores: Scores, top_p: float) -> Ids:
    """Return the indices, ascending, of the smallest set of highest scores whose probabilities sum to at
    least `top_p`."""
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    # All tokens less likely than (1 - top_p) / size weigh less than 1 - top_p together. So more than top_p
    # precedes each of them, and only the other tokens need sorting. (Half the bound, because of rounding.)
    likely = np.flatnonzero(probabilities >= (1.0 - top_p) / (2 * len(probabilities)))
    order = likely[highest(probabilities[likely], len(likely))]
    enough = np.searchsorted(np.cumsum(probabilities[order]), top_p) + 1
    return np.sort(order[:enough])


def highest(scores: NDArray[np.floating], count: int) -> Ids:
    """Return the indices of the `count` highest scores, best first; equal scores are in order of index."""
    indices = np.arange(len(scores))
    if count < len(scores):
        threshold = np.partition(scores, -count)[-count] if count else np.inf
        indices = np.flatnonzero(scores >= threshold)
    best_first: Ids = indices[np.argsort(-scores[indices], kind="stable")]
    return best_first[:count]


def _draw(rows: Sequence[Row], drawn: Sequence[tuple[int, Ids, Scores]]) -> list[int]:
    """Return the best token of each drawn row under its noise. The noise is computed for all rows at once."""
    if not drawn:
        return []
    sizes = [len(ids) for _, ids, _ in drawn]

    def repeated(values: list[int]) -> NDArray[np.uint64]:
        return np.repeat(np.array(values, dtype=np.uint64), sizes)

    picked = [rows[index] for index, _, _ in drawn]
    noise = gumbel(
        repeated([seed_of(row.params) for row in picked]),
        repeated([row.choice for row in picked]),
        repeated([len(row.outputs) for row in picked]),
        np.concatenate([ids for _, ids, _ in drawn]),
    )
    parts = np.split(noise, np.cumsum(sizes)[:-1])
    return [int(ids[(scores + part).argmax()]) for (_, ids, scores), part in zip(drawn, parts, strict=True)]


def seed_of(params: SamplingParams) -> int:
    """Return the seed of a sampled request. Raises ValueError if there is none."""
    if params.seed is None:
        raise ValueError("a sampled request needs a seed: it gets one at admission")
    return params.seed
