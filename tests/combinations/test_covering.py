"""Covering arrays contain every pair of values that is not refused."""

from random import Random
from unittest import mock

from tests.combinations.axes import AXES, axes, refusal, settings
from tests.combinations.covering import Row, all_pairs, cover, draw_three, pairs

SMALL = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q", "r", "s"], "d": ["u", "v"]}


def test_every_pair_is_covered_with_few_rows() -> None:
    covering = cover(SMALL, lambda row: "")
    covered = {pair for row in covering.rows for pair in pairs(row)}
    assert covered == set(all_pairs(SMALL))
    assert not covering.holes
    assert 12 <= len(covering.rows) <= 16, "3 x 4 pairs need at least 12 rows"


def test_refused_pairs_are_holes_with_their_reason() -> None:
    def refuse(row: Row) -> str:
        return "a = 1 needs b = y" if (row["a"], row["b"]) == ("1", "x") else ""

    covering = cover(SMALL, refuse)
    assert set(all_pairs(SMALL)) == {pair for row in covering.rows for pair in pairs(row)} | set(
        covering.holes
    )
    assert covering.holes == {frozenset({("a", "1"), ("b", "x")}): "a = 1 needs b = y"}
    assert not any(refuse(row) for row in covering.rows)


def test_a_pair_that_needs_other_values_is_no_hole() -> None:
    """Pairs that need certain other values are covered: `a = 2` needs one of two values, `c = s` another, and
    `a = 3` with `d = v` is refused regardless."""

    def refuse(row: Row) -> str:
        reasons = {
            "a = 2 needs b = y": row["a"] == "2" and row["b"] == "x",
            "c = s needs d = v": row["c"] == "s" and row["d"] == "u",
            "a = 3 excludes c = s": (row["a"], row["c"]) == ("3", "s"),
        }
        return next((reason for reason, refused in reasons.items() if refused), "")

    covering = cover(SMALL, refuse)
    assert {tuple(sorted(hole)): reason for hole, reason in covering.holes.items()} == {
        (("a", "2"), ("b", "x")): "a = 2 needs b = y",
        (("c", "s"), ("d", "u")): "c = s needs d = v",
        (("a", "3"), ("c", "s")): "a = 3 excludes c = s",
    }
    assert any((row["a"], row["c"]) == ("2", "s") for row in covering.rows)


def test_three_values_are_drawn_and_the_rest_is_default() -> None:
    rows = [draw_three(SMALL, Random(seed)) for seed in range(50)]
    changed = [sum(row[axis] != SMALL[axis][0] for axis in SMALL) for row in rows]
    assert max(changed) == 3
    assert {row["c"] for row in rows} == set(SMALL["c"])


def test_holes_of_the_matrix_are_refused_by_the_name_of_one_of_their_settings() -> None:
    covering = cover(axes("live"), refusal)
    assert covering.holes
    for hole, reason in covering.holes.items():
        row = {axis: names[0] for axis, names in axes("live").items()} | dict(hole)
        assert any(name in reason for name in settings(row)), (sorted(hole), reason)


def test_values_whose_package_is_missing_are_in_no_row_and_refused_by_its_name() -> None:
    row = {axis: next(iter(table)) for axis, table in AXES.items()} | {"launcher": "ray"}
    with (
        mock.patch("streamserve.settings.cluster.find_spec", return_value=None),
        mock.patch("tests.combinations.axes.find_spec", return_value=None),
        mock.patch.dict("tests.combinations.axes._REFUSALS", clear=True),
    ):
        assert axes("live")["launcher"] == ["local", "join"]
        assert "Ray is not installed" in refusal(row)
