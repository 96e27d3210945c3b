"""SLO admission: as many requests as can meet their targets together, against brute force."""

from collections import Counter
from itertools import combinations_with_replacement
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.slo_admission import Request, admit, discounted_tokens, sustainable
from streamserve.speculation.outlook import Means
from tests.speculation.strategies import curves

targets = st.lists(st.sampled_from([None, inf, 0.5, 1.0, 2.0, 4.0]), max_size=8)


def means(step, draft: float = 0.01, acceptance: float = 0.8, depth: int = 4, others: int = 0) -> Means:
    return Means(
        step if callable(step) else lambda query_tokens: step[query_tokens],
        lambda n: draft * n,
        acceptance,
        depth,
        others,
    )


@given(targets, curves, st.floats(0, 0.2), st.floats(0, 1), st.integers(0, 3), st.integers(0, 20))
def test_targets_are_sustainable_when_some_depths_meet_them_all(
    tpots, curve, draft, acceptance, depth, others
) -> None:
    averages = means(curve, draft, acceptance, depth, others)
    strict = sorted({t for t in tpots if t not in (None, inf)})

    def all_met(depths: dict[float, int]) -> bool:
        depth_by_request = [depths.get(t, 0) if t else 0 for t in tpots]
        query_tokens = len(tpots) + sum(depth_by_request) + others
        seconds = averages.step(query_tokens) + max(depth_by_request, default=0) * averages.draft(
            sum(d > 0 for d in depth_by_request)
        )
        return all(t * discounted_tokens(acceptance, depths[t]) >= seconds for t in strict)

    # A looser target never requires more draft tokens, so these are all the choices to consider.
    choices = combinations_with_replacement(range(depth + 1), len(strict))
    possible = any(
        all_met(dict(zip(strict, sorted(admitted, reverse=True), strict=True))) for admitted in choices
    )
    assert sustainable(Counter(tpots), averages) == possible


@given(targets, targets, curves)
def test_more_requests_never_make_targets_easier(tpots, more, curve) -> None:
    if sustainable(Counter([*tpots, *more]), means(curve)):
        assert sustainable(Counter(tpots), means(curve))


def test_due_prompt_tokens_take_their_part_of_the_step() -> None:
    averages = means(lambda query_tokens: 0.1 * query_tokens, depth=0)
    assert sustainable({1.0: 8}, averages)
    assert not sustainable({1.0: 8}, averages, prompts=4.0)


@given(st.lists(st.sampled_from([None, inf, 0.5, 1.0, 4.0]), min_size=1, max_size=8), targets, curves)
def test_one_request_is_always_admitted_and_aged_in_ones_are(tpots, decoding, curve) -> None:
    prompts = [Request(tpot, 10 + i) for i, tpot in enumerate(tpots)]
    assert any(admit(prompts, [], means(curve)))
    aged_in = [prompt._replace(aged_in=i == 0) for i, prompt in enumerate(prompts)]
    assert admit(aged_in, [Request(tpot) for tpot in decoding], means(curve))[0]
    assert all(admit([Request(None, 9)] * 3, [Request(None), Request(inf)], means(curve)))


def test_where_not_all_fit_those_with_the_least_work_are_admitted() -> None:
    """Five query tokens fit into the target, three of them are taken."""
    averages = means(lambda query_tokens: 0.2 * query_tokens, depth=0)
    prompts = [Request(1.0, 50), Request(1.0, 10), Request(inf, 1), Request(1.0, 20), Request(1.0, 30)]
    assert admit(prompts, [Request(1.0)] * 3, averages) == [False, True, False, True, False]


def test_an_infeasible_target_delays_no_prompt() -> None:
    averages = means(lambda query_tokens: 0.2 * query_tokens, depth=0)
    assert admit([Request(1.0, 10)], [Request(0.01)], averages) == [True]
    assert admit([Request(0.01, 10)], [Request(1.0)], averages) == [True]


def test_priority_comes_before_targets() -> None:
    averages = means(lambda query_tokens: 0.2 * query_tokens, depth=0)
    urgent, plain = Request(1.0, 10, priority=-1), Request(1.0, 1)
    assert admit([plain, urgent], [Request(1.0)] * 4, averages) == [False, True]
    assert admit([plain, urgent], [Request(1.0)] * 5, averages) == [False, True]
    assert admit([urgent], [Request(1.0, priority=-1)] * 5, averages) == [False]
