"""Small runs leave out cases, but run every value of each parameter."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.small_runs import cases_left_out, combinations_of, values_of

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, 1.5, "z", ()]}


def cases_of(axes: dict[str, list[Any]]) -> list[Any]:
    return [
        SimpleNamespace(
            callspec=SimpleNamespace(params=dict(zip(axes, values, strict=True))),
            iter_markers=lambda name: [pytest.mark.parametrize("a", []).mark],
        )
        for values in product(*axes.values())
    ]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 15), (3, 24)])
def test_every_combination_stays_in_few_cases(strength: int, most: int) -> None:
    cases = cases_of(AXES)
    left_out = cases_left_out(cases, strength)
    kept = [case for case in cases if not any(case is other for other in left_out)]
    found = set().union(*(combinations_of(values_of(case), strength) for case in kept))
    assert found == set().union(*(combinations_of(values_of(case), strength) for case in cases))
    assert len(kept) <= most


def test_a_test_with_one_parameter_keeps_all_of_its_values() -> None:
    assert cases_left_out(cases_of({"a": [1, 2, 3]}), 2) == []


def test_parameters_given_together_are_one() -> None:
    case = SimpleNamespace(
        callspec=SimpleNamespace(params={"a": 1, "b": "x", "c": None}),
        iter_markers=lambda name: [pytest.mark.parametrize(("a", "c"), []).mark],
    )
    assert values_of(case) == {"a,c": "[1, None]", "b": "['x']"}  # type: ignore[arg-type]


@pytest.mark.each_value
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_cases_are_left_out_here(request: pytest.FixtureRequest, first: int, second: int) -> None:
    """This test runs a diagonal of its cases in small runs, and all of them with --full."""
    assert request.config.getoption("--full") or first == second
