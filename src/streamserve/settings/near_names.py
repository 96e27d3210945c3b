"""Names that resemble a misspelt one."""

from collections.abc import Iterable

_LETTERS_PER_EDIT = 5
"""A name may differ by one edit for this many letters. With more edits, a suggestion is often another thing:
--help for --hf-repo."""


def near_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` may be a misspelling of; None if none is near."""
    limit = max(1, len(name) // _LETTERS_PER_EDIT)
    near = [(edits(name, other, limit), other) for other in names]
    count, nearest = min(near, default=(limit + 1, ""))
    return nearest if count <= min(limit, len(name) - 2) else None


def edits(one: str, other: str, limit: int) -> int:
    """Return how many letters must be inserted, left out, replaced or swapped with their neighbour to turn
    `one` into `other`. Numbers above `limit` are not exact."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        current = [row]
        for column, wanted in enumerate(other, start=1):
            cost = min(last[column] + 1, current[-1] + 1, last[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == wanted:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, last = last, current
    return last[-1]
