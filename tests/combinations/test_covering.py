"""The generator of covering arrays: every pair is in a row, or refused wherever it could be."""

from random import Random

from tests.combinations.axes import axes, refusal, settings
from tests.combinations.covering import Row, all_pairs, cover, draw_three, pairs

SMALL = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q", "r", "s"], "d": ["u", "v"]}


def test_every_pair_is_covered_with_few_rows() -> None:
    covering = cover(SMALL, lambda row: "")
    covered = {pair for row in covering.rows for pair in pairs(row)}
    assert covered == set(all_pairs(SMALL))
    assert not covering.holes
    assert 12 <= len(covering.rows) <= 16, "3 x 4 is the least"


def test_refused_pairs_are_holes_with_their_reason() -> None:
    def refuse(row: Row) -> str:
        return "a = 1 needs b = y" if (row["a"], row["b"]) == ("1", "x") else ""

    covering = cover(SMALL, refuse)
    assert covering.holes == {frozenset({("a", "1"), ("b", "x")}): "a = 1 needs b = y"}
    assert not any(refuse(row) for row in covering.rows)


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
