"""Which cases of a parametrized test small runs leave out: the same every time, in any order of the tests."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Values = frozenset[tuple[str, str]]


def group_cases(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test by the test's name, in the order of their parameters."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {name: sorted(cases, key=_indices) for name, cases in groups.items()}


def cases_left_out(cases: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Return the cases that are not needed for every combination of the values of `strength` parameters.

    The choice is greedy: the next case is the one with the most combinations that no earlier case has, the
    first of equals.
    """
    combined = {id(case): combinations_of(values_of(case), strength) for case in cases}
    missing = set().union(*combined.values())
    left = list(cases)
    while missing:
        best = max(left, key=lambda case: len(combined[id(case)] & missing))
        missing -= combined[id(best)]
        left.remove(best)
    return left


def combinations_of(values: dict[str, str], strength: int) -> set[Values]:
    """Return the combinations of this number of values; of all values if there are fewer."""
    return {frozenset(chosen) for chosen in combinations(values.items(), min(strength, len(values)))}


def values_of(case: pytest.Item) -> dict[str, str]:
    """Return a case's values by parameter, as texts. Parameters that are given together count as one."""
    params = _callspec(case).params
    together = [_names(marker.args[0]) for marker in case.iter_markers("parametrize")]
    alone = params.keys() - {name for names in together for name in names}
    return {
        ",".join(names): repr([params[name] for name in names]) for names in (*together, *zip(sorted(alone)))
    }


def _names(argument: str | Sequence[str]) -> tuple[str, ...]:
    return (argument,) if isinstance(argument, str) else tuple(argument)


def _indices(case: pytest.Item) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(_callspec(case).indices.items()))


def _callspec(case: pytest.Item) -> Any:
    """Return a case's parameters: `params` and `indices` by name."""
    return case.callspec  # type: ignore[attr-defined]
