"""Goodput-optimal speculation against brute force, and its guards."""

from itertools import product
from math import prod

from hypothesis import example, given
from hypothesis import strategies as st

from streamserve.speculation.goodput import LEEWAY, SLOWEST, STEPS, best_shape, select, shapes, spread
from streamserve.speculation.outlook import Candidate, Drafted, Outlook
from streamserve.speculation.shapes import PLAIN, Shape, expected_by_level, expected_tokens
from streamserve.speculation.slo import NO_NEED, Need
from streamserve.speculation.tree import TokenTree
from tests.speculation.strategies import connected, curves, expected, needs, subtrees, targets, trees


def rate(forest, kept, plain, spent, curve) -> float:
    guessed = sum(len(nodes) - 1 for nodes in kept)
    total = sum(expected(tree, nodes) for tree, nodes in zip(forest, kept, strict=True))
    return total / (spent + curve[plain + guessed])


def drafted(forest, curve, plain=None, spent=0.0, budget=64, needs=None, undrafted=()) -> Drafted:
    """A step of these trees; without needs nobody has a target."""
    plain = len(forest) + len(undrafted) if plain is None else plain
    step = curve if callable(curve) else lambda rows: curve[rows]
    return Drafted(forest, needs or [NO_NEED] * len(forest), undrafted, plain, spent, step, budget)


@given(st.lists(trees(4), min_size=1, max_size=3), curves, st.floats(0, 3), st.integers(0, 12))
def test_the_selection_is_the_best_of_all_connected_ones(forest, curve, spent, budget):
    plain = len(forest)
    kept = select(drafted(forest, curve, spent=spent, budget=budget))
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, kept, strict=True))
    assert sum(len(nodes) - 1 for nodes in kept) <= budget
    best = max(
        rate(forest, one, plain, spent, curve)
        for one in product(*map(subtrees, forest))
        if sum(len(nodes) - 1 for nodes in one) <= budget
    )
    assert rate(forest, kept, plain, spent, curve) >= best - 1e-9


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.integers(1, 8))
def test_requests_without_guesses_keep_their_speed(forest, curve, others):
    plain = len(forest) + others
    kept = select(drafted(forest, curve, undrafted=[NO_NEED] * others))
    guessed = sum(len(nodes) - 1 for nodes in kept)
    assert curve[plain + guessed] <= curve[plain] / SLOWEST + 1e-12


def test_a_staircase_is_crossed_when_the_next_landing_pays():
    """The second node alone does not pay, but with the third and fourth on the same stair it does."""
    curve = lambda rows: 1.0 if rows <= 2 else 1.5  # noqa: E731
    tree = TokenTree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3), (1.0,) * 5, (1.0, 0.9, 0.89, 0.88, 0.87))
    assert select(drafted([tree], curve, budget=8)) == [[0, 1, 2, 3, 4]]


def test_prompt_chunks_in_the_step_do_not_make_guesses_cheap():
    """A hopeless guess is as little worth beside a long chunk as alone."""
    tree = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.05))
    curve = lambda rows: 1.0 + rows / 10  # noqa: E731
    assert select(drafted([tree], curve, budget=8)) == [[0]]
    assert select(drafted([tree], curve, plain=301, budget=8)) == [[0]]
    assert best_shape(1, 300, [[0.05]], curve, lambda shape: 0.0, 8, 8) == PLAIN


def test_nothing_is_drafted_where_rows_cost_what_they_cost_alone():
    assert best_shape(8, 0, [[0.9]], lambda rows: rows * 1.0, lambda shape: 0.0, 8, 8) == PLAIN


def test_a_free_row_is_always_taken():
    shape = best_shape(1, 0, [[0.8], [0.9]], lambda rows: 1.0 if rows <= 6 else 9.0, lambda shape: 0.0, 8, 16)
    assert shape == Shape(5, 1)


def test_an_expensive_draft_is_not_paid_for():
    assert best_shape(1, 0, [[0.8]], lambda rows: 1.0, lambda shape: shape.depth * 1.0, 8, 8) == PLAIN


@given(st.floats(0, 1), st.integers(0, 20))
def test_expected_tokens_are_the_sum_of_path_probabilities(cover, depth):
    assert abs(expected_tokens(cover, depth) - sum(cover**level for level in range(depth + 1))) < 1e-6


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 8))
def test_levels_may_differ_in_how_likely_they_are(covers, depth):
    deep = (covers + covers[-1:] * depth)[:depth]
    assert (
        abs(expected_by_level(covers, depth) - sum(prod(deep[:level]) for level in range(depth + 1))) < 1e-9
    )


BUSY = Need(tpot=1.0, decode_seconds=10.0, decoded=10)
"""On target so far, with one second a token."""


def met(step: Drafted, kept: list[list[int]], leeway: float = 0.0) -> list[bool]:
    """Who is on target behind the step, or catching up with it, bystanders last; `leeway` in tokens."""
    seconds = step.spent + step.step(step.plain + sum(len(nodes) - 1 for nodes in kept))
    brought = [expected(tree, nodes) for tree, nodes in zip(step.trees, kept, strict=True)]
    return [
        spread(need).tokens(seconds) <= tokens + leeway + 1e-9
        for need, tokens in zip(
            (*step.needs, *step.undrafted), (*brought, *(1.0 for _ in step.undrafted)), strict=True
        )
    ]


def test_who_lags_gets_what_its_target_needs_before_the_likelier_guesses_of_others() -> None:
    curve = lambda rows: 1.0 + max(0, rows - 3) * 10.0  # noqa: E731
    hard = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.5))
    easy = TokenTree((1, 2), (-1, 0), (1.0, 1.0), (1.0, 0.9))
    late = Need(tpot=1.0, decode_seconds=10.5, decoded=10)
    assert select(drafted([hard, easy], curve)) == [[0], [0, 1]]
    assert select(drafted([hard, easy], curve, needs=[late, NO_NEED])) == [[0, 1], [0]]


@given(st.floats(0.01, 20), st.floats(0, 50), st.integers(0, 50), st.floats(0.01, 10))
def test_who_is_behind_catches_up_over_some_steps_and_who_is_ahead_may_use_it(
    tpot, since, decoded, t
) -> None:
    need = Need(tpot, since, decoded)
    behind = need.tokens(t) - t / tpot
    wanted = spread(need).tokens(t) - t / tpot
    assert abs(wanted - (behind / STEPS if behind > 0 else behind)) <= 1e-6 * (1 + abs(behind))


def test_what_cannot_be_met_is_not_chased_at_the_cost_of_those_on_target() -> None:
    curve = lambda rows: 0.9 + 0.05 * rows  # noqa: E731
    long = TokenTree(tuple(range(9)), tuple(range(-1, 8)), (1.0,) * 9, tuple(0.9**n for n in range(9)))
    infeasible = Need(tpot=0.01, decode_seconds=10.0, decoded=10)
    step = drafted([long, long.keep([0])], curve, needs=[infeasible, BUSY])
    assert met(step, select(step), LEEWAY)[1]


@given(st.lists(trees(4), min_size=1, max_size=3), curves, st.floats(0, 1), st.data())
def test_all_targets_are_met_where_any_connected_selection_meets_them(forest, curve, spent, data) -> None:
    asked = [data.draw(targets) for _ in forest]
    step = drafted(forest, curve, spent=spent, needs=asked)
    kept = select(step)
    assert all(connected(tree, nodes) for tree, nodes in zip(forest, kept, strict=True))
    if any(all(met(step, list(one))) for one in product(*map(subtrees, forest))):
        assert all(met(step, kept, LEEWAY))


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.lists(needs, max_size=3), st.data())
def test_nobody_on_target_is_pushed_off_it_by_more_than_the_leeway(forest, curve, undrafted, data) -> None:
    asked = [data.draw(needs) for _ in forest]
    step = drafted(forest, curve, needs=asked, undrafted=undrafted)
    plainly = met(step, [[0] for _ in forest])
    after = met(step, select(step), LEEWAY)
    assert sum(after) >= sum(plainly)
    if all(plainly):
        assert all(after)


@given(st.lists(trees(), min_size=1, max_size=4), curves, st.integers(1, 4))
def test_targets_leave_those_without_one_their_speed(forest, curve, others) -> None:
    step = drafted(forest, curve, needs=[BUSY] * len(forest), undrafted=[NO_NEED] * others)
    guessed = sum(len(nodes) - 1 for nodes in select(step))
    assert curve[step.plain + guessed] <= curve[step.plain] / SLOWEST + 1e-12


EQUAL = 0.6681266944688354
"""So likely that 1 + EQUAL + EQUAL is rounded."""


@example(
    [
        TokenTree((0, 1), (-1, 0), (1.0,) * 2, (1.0, EQUAL)),
        TokenTree((0, 1, 2), (-1, 0, 0), (1.0,) * 3, (1.0, EQUAL, EQUAL)),
    ],
    [1.0] * 5 + [9.0] * 60,
    0.0,
)
@given(st.lists(trees(), min_size=1, max_size=4), curves, st.floats(0, 1))
def test_loose_targets_change_nothing(forest, curve, spent) -> None:
    loose = [Need(tpot=1e6)] * len(forest)
    blind = select(drafted(forest, curve, spent=spent))
    assert select(drafted(forest, curve, spent=spent, needs=loose)) == blind


def outlook(needs, curve, covers=((0.7,),), undrafted=()) -> Outlook:
    return Outlook(
        candidates=[Candidate(16, 16, need) for need in needs],
        others=len(undrafted),
        step=curve,
        draft=lambda shapes: 0.1 * max(shape.depth for shape in shapes),
        covers=covers,
        nodes=16,
        undrafted=undrafted,
    )


def test_only_those_that_need_it_are_drafted_for_where_guessing_does_not_pay_for_all() -> None:
    curve = lambda rows: 0.5 + 0.5 * rows  # noqa: E731
    late = Need(tpot=4.5, decode_seconds=65.0, decoded=10)
    fine = Need(tpot=50.0, decode_seconds=10.0, decoded=10)
    found = shapes(outlook([late, fine, fine, fine], curve))
    assert found[0].depth >= 1
    assert found[1:] == [PLAIN] * 3
    assert shapes(outlook([fine] * 4, curve)) == [PLAIN] * 4


def test_shapes_are_those_of_no_targets_where_all_are_met() -> None:
    curve = lambda rows: 1.0 + rows / 64  # noqa: E731
    blind = shapes(outlook([NO_NEED] * 3, curve))
    assert blind[0].depth > 1
    assert shapes(outlook([Need(tpot=100.0)] * 3, curve)) == blind
