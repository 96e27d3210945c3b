"""A cost curve that learns online: a profile, corrected by measured step times.

A correction is a factor on the profile's value, for each bin of query tokens. Up to 128 query tokens each
number has its own bin, because a plain step and the speculating step compared with it may differ by one
token. A bin without recent observations takes the factor of the nearest bins with observations. Whatever the
profile says, a step with more tokens costs no less than a step with fewer: where bins contradict each other,
the lower value stands, since disturbances only add time.
"""

import math
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

RATE = 0.1
"""Minimum weight of a new observation in a correction."""

LIMIT = 3.0
"""A single observation is limited to this factor above or below the expected value, because of outliers."""

FADE = 100.0
"""Number of steps in which the weight of a bin with one observation falls to 1/e; n observations last n times
longer. Without fading, a single outlier could keep a number of tokens from ever being tried again."""

WELL_KNOWN = 20.0
"""Weight above which an observation only updates its own bin's factor. The other bins' factors follow within
`STALE` steps."""

NEIGHBOURS = 0.25
"""Weight of the nearest known bins in a bin's value, in observations."""

BOUND_WEIGHT = 0.02
"""Weight from which a bin's value is a lower bound for larger bins in `lower_bound`."""

ERROR_RATE = 0.01
"""Weight of a step in the running average of the profile's error."""
CONTRADICTED = 1.25
"""Factor between measured and profiled step times above which the profile counts as contradicted."""
MIN_STEPS = 300
"""Steps observed before the profile can be contradicted."""

KNOWN = 0.5
"""Weight from which a bin counts as known: its value bounds other bins' values."""

STALE = 16
"""Maximum number of steps between two computations of all bins' factors."""

KV_CHANGE = 1.5
"""Bins are compared by the profile's values at one number of KV tokens. The values are computed again when a
step's KV differs from that number by this factor and by MIN_KV_CHANGE tokens."""
MIN_KV_CHANGE = 1024

MIN_SECONDS = 1e-12
"""Lower bound of a profile's values, in seconds, so that their ratios exist."""

EXACT = 128
"""Maximum number of query tokens that has a bin to itself."""
LARGEST = 1024
"""Steps with more query tokens than this share the last bin."""


def _edges() -> list[int]:
    """Return the numbers of query tokens at which a bin begins: each number up to EXACT, then each a twelfth
    larger than the last."""
    edges = list(range(1, EXACT + 1))
    while edges[-1] < LARGEST:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 13 / 12)))
    return edges


EDGES = tuple(_edges())
_BIN_OF = tuple(max(bisect_right(EDGES, query_tokens) - 1, 0) for query_tokens in range(LARGEST + 1))
_LOG_EDGES = np.log2(EDGES)


class RefinedCost:
    """Seconds of a step by query tokens and the KV tokens that it reads; `prior` is the profile."""

    def __init__(self, prior: Callable[[int, int], float]) -> None:
        self._prior = prior
        self._steps = 0
        self._log = [0.0] * len(EDGES)
        self._count = [0.0] * len(EDGES)
        self._seen_at = [0] * len(EDGES)
        self._factors = [1.0] * len(EDGES)
        self._steps_since_prior = 0
        self._profile_error = 0.0
        self._updated_at = 0
        self._kv = -1
        self._query_tokens = list(EDGES)  # for each bin, the query tokens of its latest step
        self._prior_values = np.ones(len(EDGES))

    def __call__(self, query_tokens: int, kv_tokens: int) -> float:
        return self._prior(query_tokens, kv_tokens) * self._factors[_bin(query_tokens)]

    @property
    def observed(self) -> bool:
        """Whether any step was observed."""
        return self._steps > 0

    @property
    def contradicted(self) -> bool:
        """Whether the mean difference of step times from the profile is above CONTRADICTED, over enough
        steps."""
        return self._steps_since_prior >= MIN_STEPS and self._profile_error > math.log(CONTRADICTED)

    @property
    def disagreement(self) -> float:
        """The mean factor between recent step times and the profile, at least 1 in either direction."""
        return math.exp(self._profile_error)

    def replace_prior(self, prior: Callable[[int, int], float]) -> None:
        """Replace the profile. The learned step times are kept: corrections are converted to the new one."""
        before, kv_tokens = self._prior, max(self._kv, 0)
        prior_values = [
            (max(before(n, kv_tokens), MIN_SECONDS), max(prior(n, kv_tokens), MIN_SECONDS))
            for n in self._query_tokens
        ]
        self._log = [
            log + math.log(old / new) for log, (old, new) in zip(self._log, prior_values, strict=True)
        ]
        self._prior, self._kv = prior, -1
        self._steps_since_prior, self._profile_error = 0, 0.0
        if self._steps:
            self._update_factors(kv_tokens)

    def weight(self, query_tokens: int) -> float:
        """Return the weight of the bin of `query_tokens`: its number of observations, faded with time."""
        index = _bin(query_tokens)
        count = self._count[index]
        return count and count * math.exp((self._seen_at[index] - self._steps) / (FADE * count))

    def lower_bound(self, query_tokens: int, kv_tokens: int) -> float:
        """Return a lower bound of a step's seconds: the estimate if the bin is known, otherwise 1/LIMIT of
        it, but no less than the next smaller bin with observations."""
        estimate = self(query_tokens, kv_tokens)
        if self.weight(query_tokens) >= KNOWN:
            return estimate
        smaller = (n for n in range(_bin(query_tokens), -1, -1) if self.weight(EDGES[n]) >= BOUND_WEIGHT)
        index = next(smaller, None)
        bound = 0.0 if index is None else self(min(self._query_tokens[index], query_tokens), kv_tokens)
        return max(estimate / LIMIT, bound)

    def observe(self, query_tokens: int, kv_tokens: int, seconds: float) -> None:
        """Record that a step of `query_tokens` and `kv_tokens` took `seconds`."""
        index, expected = _bin(query_tokens), self._prior(query_tokens, kv_tokens)
        if seconds <= 0 or expected <= 0:  # the clock is too coarse to measure it
            return
        now = seconds / expected
        if self._steps:  # the first observation is not limited: the profile may be wrong by any factor
            known = self._factors[index]
            now = min(max(now, known / LIMIT), known * LIMIT)
        weight = 1.0 + self.weight(query_tokens)
        before = self._log[index]
        after = before + max(RATE, 1.0 / weight) * (math.log(now) - before)
        self._steps += 1
        self._steps_since_prior += 1
        self._profile_error += ERROR_RATE * (abs(after) - self._profile_error)
        if query_tokens != self._query_tokens[index]:
            self._query_tokens[index], self._prior_values[index] = (
                query_tokens,
                self._prior(query_tokens, max(self._kv, 0)),
            )
        self._log[index], self._count[index], self._seen_at[index] = after, weight, self._steps
        if weight <= WELL_KNOWN or self._steps - self._updated_at >= STALE:
            self._update_factors(kv_tokens)  # takes 0.1 ms: not after every step of a small model
        else:
            self._factors[index] = math.exp(after)

    def _update_factors(self, kv_tokens: int) -> None:
        """Compute the factors of all bins from their observations: each bin's own, averaged with its known
        neighbours', and bounded so that costs never fall with query tokens."""
        self._updated_at = self._steps
        log, count, seen_at = np.array(self._log), np.array(self._count), np.array(self._seen_at)
        weights = count * np.exp((seen_at - self._steps) / (FADE * np.maximum(count, 1.0)))
        known = weights >= KNOWN
        indices = np.flatnonzero(known)
        logs = log[indices]
        near = np.interp(_LOG_EDGES, _LOG_EDGES[indices], logs)
        if len(indices) > 1:  # interpolation at a known bin returns its own value: use its neighbours instead
            positions = _LOG_EDGES[indices]
            left, right = np.r_[1, : len(indices) - 1], np.r_[1 : len(indices), len(indices) - 2]
            share = (positions - positions[left]) / np.where(
                left == right, 1.0, positions[right] - positions[left]
            )
            share = np.where(left == right, 0.0, share)
            near[indices] = logs[left] + share * (logs[right] - logs[left])
        prior_values = np.maximum(self._refresh_prior_values(kv_tokens), MIN_SECONDS)
        costs = prior_values * np.exp((weights * log + NEIGHBOURS * near) / (weights + NEIGHBOURS))
        seen = prior_values * np.exp(log)
        lower = np.maximum.accumulate(np.where(known, seen, 0.0))
        upper = np.minimum.accumulate(np.where(known, seen, np.inf)[::-1])[::-1]
        self._factors = (np.minimum(np.maximum(costs, lower), upper) / prior_values).tolist()

    def _refresh_prior_values(self, kv_tokens: int) -> NDArray[np.float64]:
        """Return the profile's value for each bin, at about `kv_tokens` KV tokens."""
        high, low = max(kv_tokens, self._kv), min(kv_tokens, self._kv)
        if self._kv < 0 or (high > KV_CHANGE * low and high - low > MIN_KV_CHANGE):
            self._kv = kv_tokens
            self._prior_values = np.array(
                [self._prior(query_tokens, kv_tokens) for query_tokens in self._query_tokens]
            )
        return self._prior_values


def _bin(query_tokens: int) -> int:
    return _BIN_OF[query_tokens] if query_tokens <= LARGEST else len(EDGES) - 1
