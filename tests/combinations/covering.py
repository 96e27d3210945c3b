"""Covering arrays: few rows in which every pair of values of two axes occurs, except for holes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

Row = dict[str, str]
"""A value by axis."""
Pair = frozenset[tuple[str, str]]
Refusal = Callable[[Row], str]
"""Return why a row is refused; "" if it is not."""

CANDIDATES = 5
"""Rows that are tried for each pair: the one that covers most new pairs is taken."""
TRIES = 60
"""Rows with a pair that are refused until it counts as a hole."""


@dataclass(frozen=True)
class Covering:
    """`rows` cover every pair of values but the `holes`, which are refused in every row, with the reason."""

    rows: list[Row]
    holes: dict[Pair, str]


def pairs(row: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the pairs of values in a row."""
    return map(frozenset, combinations(sorted(row.items()), 2))


def all_pairs(axes: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Return every pair of values of two axes."""
    return [
        frozenset(((first, one), (second, other)))
        for first, second in combinations(sorted(axes), 2)
        for one in axes[first]
        for other in axes[second]
    ]


def cover(axes: Mapping[str, Sequence[str]], refusal: Refusal, seed: int = 0) -> Covering:
    """Return a covering array of strength two, made greedily."""
    rng = Random(seed)
    missing = dict.fromkeys(all_pairs(axes))
    rows: list[Row] = []
    holes: dict[Pair, str] = {}
    while missing:
        pair = next(iter(missing))
        candidates, reason = _candidates(axes, pair, missing, refusal, rng)
        if not candidates:
            holes[pair] = reason
            del missing[pair]
            continue
        best = max(candidates, key=lambda row: sum(each in missing for each in pairs(row)))
        rows.append(best)
        for each in pairs(best):
            missing.pop(each, None)
    return Covering(rows, holes)


def _candidates(
    axes: Mapping[str, Sequence[str]], pair: Pair, missing: Mapping[Pair, None], refusal: Refusal, rng: Random
) -> tuple[list[Row], str]:
    """Return rows with `pair` that are not refused; and why it is refused with all else at its default."""
    plain = {axis: values[0] for axis, values in axes.items()} | dict(pair)
    reason = refusal(plain)
    rows = [] if reason else [plain]
    for attempt in range(TRIES):
        if len(rows) >= CANDIDATES:
            break
        row = _grow(axes, pair, missing, rng)
        if attempt % 2:  # the values that were covered least are often those that are refused together
            row = draw(axes, rng, {axis: plain[axis] for axis in axes if rng.random() < 0.5} | dict(pair))
        rows += [] if refusal(row) else [row]
    return rows, reason


def _grow(axes: Mapping[str, Sequence[str]], pair: Pair, missing: Mapping[Pair, None], rng: Random) -> Row:
    """Return a row that starts with `pair` and takes for each other axis, in random order, the value with the
    most pairs that are missing."""
    row = dict(pair)
    for axis in rng.sample([axis for axis in axes if axis not in row], len(axes) - len(row)):
        new = {
            value: sum(frozenset(((axis, value), item)) in missing for item in row.items())
            for value in axes[axis]
        }
        most = max(new.values())
        row[axis] = rng.choice([value for value, count in new.items() if count == most])
    return row


def draw(axes: Mapping[str, Sequence[str]], rng: Random, fixed: Row | None = None) -> Row:
    """Return a random row with the values that are `fixed`."""
    return {axis: rng.choice(list(values)) for axis, values in axes.items()} | (fixed or {})


def draw_three(axes: Mapping[str, Sequence[str]], rng: Random) -> Row:
    """Return a row with random values of three axes and the first value of all others."""
    chosen = rng.sample(list(axes), 3)
    return {axis: values[0] for axis, values in axes.items()} | {
        axis: rng.choice(list(axes[axis])) for axis in chosen
    }
