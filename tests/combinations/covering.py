"""Covering arrays: few rows in which every pair of values of two axes occurs, except for holes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

Row = dict[str, str]
"""A row has a value for each axis."""
Pair = frozenset[tuple[str, str]]
Refusal = Callable[[Row], str]
"""A function that returns why a row is refused; "" if it is accepted."""

CANDIDATES = 5
"""Number of rows that are tried for each pair. The row that covers most new pairs is taken."""
TRIES = 60
"""Maximum number of rows that are drawn to find CANDIDATES accepted ones."""


@dataclass(frozen=True)
class Covering:
    """A covering array: `rows` cover every pair of values except for the `holes`, which are refused with a
    reason."""

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
    holes = find_holes(axes, refusal)
    missing = dict.fromkeys(pair for pair in all_pairs(axes) if pair not in holes)
    rows: list[Row] = []
    while missing:
        candidates = _candidates(axes, next(iter(missing)), missing, refusal, rng)
        best = max(candidates, key=lambda row: sum(each in missing for each in pairs(row)))
        rows.append(best)
        for each in pairs(best):
            missing.pop(each, None)
    return Covering(rows, holes)


def find_holes(axes: Mapping[str, Sequence[str]], refusal: Refusal) -> dict[Pair, str]:
    """Return the pairs of values that are refused although each of the two values alone is accepted, with the
    reason."""
    rows = {pair: _rows_with(axes, pair, refusal) for pair in all_pairs(axes)}
    return {pair: refusal(tried[0]) for pair, tried in rows.items() if all(map(refusal, tried))}


def _rows_with(axes: Mapping[str, Sequence[str]], pair: Pair, refusal: Refusal) -> list[Row]:
    """Return rows with `pair` and the other values that its values need."""
    one, other = (_needs(axes, *item, refusal) for item in sorted(pair))
    return [_first_values(axes) | first | second | dict(pair) for first in one for second in other]


def _needs(axes: Mapping[str, Sequence[str]], axis: str, value: str, refusal: Refusal) -> list[Row]:
    """Return the values of other axes that a value needs: each with which it is accepted, or none if it is
    accepted with the default values of all other axes."""
    plain = _first_values(axes) | {axis: value}
    if not refusal(plain):
        return [{}]
    changes = [{name: each} for name in axes if name != axis for each in axes[name][1:]]
    return [change for change in changes if not refusal(plain | change)] or [{}]


def _first_values(axes: Mapping[str, Sequence[str]]) -> Row:
    return {axis: values[0] for axis, values in axes.items()}


def _candidates(
    axes: Mapping[str, Sequence[str]], pair: Pair, missing: Mapping[Pair, None], refusal: Refusal, rng: Random
) -> list[Row]:
    """Return rows with `pair`, which is no hole, that are not refused."""
    rows = [next(row for row in _rows_with(axes, pair, refusal) if not refusal(row))]
    for attempt in range(TRIES):
        if len(rows) >= CANDIDATES:
            break
        row = _grow(axes, pair, missing, rng)
        if attempt % 2:  # Rarely covered values are often those that are refused together.
            kept = {axis: rows[0][axis] for axis in axes if rng.random() < 0.5}
            row = draw(axes, rng, kept | dict(pair))
        rows += [] if refusal(row) else [row]
    return rows


def _grow(axes: Mapping[str, Sequence[str]], pair: Pair, missing: Mapping[Pair, None], rng: Random) -> Row:
    """Return a row that starts with `pair` and takes for each other axis, in random order, the value that
    covers the most missing pairs."""
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
