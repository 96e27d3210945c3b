"""Who is taken in: as many as can be kept on their targets together, against brute force and its guards."""

from collections import Counter
from itertools import combinations_with_replacement
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.slo_admission import Request, admitted, counted_on, sustainable
from streamserve.speculation.outlook import Means
from tests.speculation.strategies import curves

targets = st.lists(st.sampled_from([None, inf, 0.5, 1.0, 2.0, 4.0]), max_size=8)


def means(step, draft: float = 0.01, cover: float = 0.8, depth: int = 4, others: int = 0) -> Means:
    return Means(
        step if callable(step) else lambda rows: step[rows], lambda n: draft * n, cover, depth, others
    )


@given(targets, curves, st.floats(0, 0.2), st.floats(0, 1), st.integers(0, 3), st.integers(0, 20))
def test_targets_are_sustainable_when_some_depths_keep_them_all(
    asked, curve, draft, cover, depth, others
) -> None:
    there = means(curve, draft, cover, depth, others)
    strict = sorted({t for t in asked if t not in (None, inf)})

    def kept(depths: dict[float, int]) -> bool:
        each = [depths.get(t, 0) if t else 0 for t in asked]
        rows = len(asked) + sum(each) + others
        seconds = there.step(rows) + max(each, default=0) * there.draft(sum(d > 0 for d in each))
        return all(t * counted_on(cover, depths[t]) >= seconds for t in strict)

    # Who has more time never needs more guesses, so these are all the choices worth looking at.
    choices = combinations_with_replacement(range(depth + 1), len(strict))
    possible = any(kept(dict(zip(strict, sorted(found, reverse=True), strict=True))) for found in choices)
    assert sustainable(Counter(asked), there) == possible


@given(targets, targets, curves)
def test_more_company_never_makes_targets_easier(asked, more, curve) -> None:
    if sustainable(Counter([*asked, *more]), means(curve)):
        assert sustainable(Counter(asked), means(curve))


def test_what_is_due_of_prompts_takes_its_part_of_the_step() -> None:
    there = means(lambda rows: 0.1 * rows, depth=0)
    assert sustainable({1.0: 8}, there)
    assert not sustainable({1.0: 8}, there, prompts=4.0)


@given(st.lists(st.sampled_from([None, inf, 0.5, 1.0, 4.0]), min_size=1, max_size=8), targets, curves)
def test_somebody_is_always_served_and_the_forced_are(asked, decoding, curve) -> None:
    prompts = [Request(tpot, 10 + i) for i, tpot in enumerate(asked)]
    assert any(admitted(prompts, [], means(curve)))
    forced = [one._replace(forced=i == 0) for i, one in enumerate(prompts)]
    assert admitted(forced, [Request(tpot) for tpot in decoding], means(curve))[0]
    assert all(admitted([Request(None, 9)] * 3, [Request(None), Request(inf)], means(curve)))


def test_where_not_all_can_be_served_it_is_those_that_take_least() -> None:
    """Five rows fit into the target, three of them are taken."""
    there = means(lambda rows: 0.2 * rows, depth=0)
    prompts = [Request(1.0, 50), Request(1.0, 10), Request(inf, 1), Request(1.0, 20), Request(1.0, 30)]
    assert admitted(prompts, [Request(1.0)] * 3, there) == [False, True, False, True, False]


def test_a_target_that_nobody_could_keep_holds_nobody_up() -> None:
    there = means(lambda rows: 0.2 * rows, depth=0)
    assert admitted([Request(1.0, 10)], [Request(0.01)], there) == [True]
    assert admitted([Request(0.01, 10)], [Request(1.0)], there) == [True]


def test_priority_goes_before_targets() -> None:
    there = means(lambda rows: 0.2 * rows, depth=0)
    urgent, plain = Request(1.0, 10, priority=-1), Request(1.0, 1)
    assert admitted([plain, urgent], [Request(1.0)] * 4, there) == [False, True]
    assert admitted([plain, urgent], [Request(1.0)] * 5, there) == [False, True]
    assert admitted([urgent], [Request(1.0, priority=-1)] * 5, there) == [False]
