"""SLO admission admits as many requests as can meet their targets together, compared with brute force."""

from collections import Counter
from itertools import combinations_with_replacement
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.request import RequestView
from streamserve.scheduling.slo_admission import (
    GRACE,
    admit,
    aging_in,
    discounted_tokens,
    has_begun,
    needs_admission,
    sustainable,
)
from streamserve.speculation.outlook import Means
from tests.speculation.strategies import curves

targets = st.lists(st.sampled_from([None, inf, 0.5, 1.0, 2.0, 4.0]), max_size=8)


def prompt(tpot: float | None, remaining: int, priority: int = 0, **fields: Any) -> RequestView:
    return RequestView(0.0, priority, remaining, tpot=tpot, **fields)


def decoding(tpot: float | None, priority: int = 0) -> RequestView:
    return RequestView(0.0, priority, 1, tpot=tpot, decoding=True)


def means(step, draft: float = 0.01, acceptance: float = 0.8, depth: int = 4) -> Means:
    return Means(
        step if callable(step) else lambda query_tokens: step[query_tokens],
        lambda n: draft * n,
        acceptance,
        depth,
    )


@given(targets, curves, st.floats(0, 0.2), st.floats(0, 1), st.integers(0, 3), st.integers(0, 20))
def test_targets_are_sustainable_when_some_depths_meet_them_all(
    tpots, curve, draft, acceptance, depth, others
) -> None:
    averages = means(curve, draft, acceptance, depth)
    strict = sorted({t for t in tpots if t not in (None, inf)})

    def all_met(depths: dict[float, int]) -> bool:
        depth_by_request = [depths.get(t, 0) if t else 0 for t in tpots]
        query_tokens = len(tpots) + sum(depth_by_request) + others
        seconds = averages.step(query_tokens) + max(depth_by_request, default=0) * averages.draft(
            sum(d > 0 for d in depth_by_request)
        )
        return all(t * discounted_tokens(acceptance, depths[t]) >= seconds for t in strict)

    # A looser target never requires more draft tokens, so no other choices need to be considered.
    choices = combinations_with_replacement(range(depth + 1), len(strict))
    possible = any(
        all_met(dict(zip(strict, sorted(admitted, reverse=True), strict=True))) for admitted in choices
    )
    assert sustainable(Counter(tpots), averages, others) == possible


@given(targets, targets, curves)
def test_more_requests_never_make_targets_easier(tpots, more, curve) -> None:
    if sustainable(Counter([*tpots, *more]), means(curve)):
        assert sustainable(Counter(tpots), means(curve))


def test_due_prompt_tokens_take_their_part_of_the_step() -> None:
    averages = means(lambda query_tokens: 0.1 * query_tokens, depth=0)
    assert sustainable({1.0: 8}, averages)
    assert not sustainable({1.0: 8}, averages, prompts=4.0)


@given(st.lists(st.sampled_from([None, inf, 0.5, 1.0, 4.0]), min_size=1, max_size=8), targets, curves)
def test_one_request_is_always_admitted_and_aged_in_ones_are(tpots, decoding_tpots, curve) -> None:
    prompts = [prompt(tpot, 10 + i) for i, tpot in enumerate(tpots)]
    assert any(admit(prompts, [], 0.0, means(curve)))
    aged_in = [prompt(tpot, 10 + i, aged_in=i == 0) for i, tpot in enumerate(tpots)]
    assert admit(aged_in, [decoding(tpot) for tpot in decoding_tpots], 0.0, means(curve))[0]
    assert all(admit([prompt(None, 9)] * 3, [decoding(None), decoding(inf)], 0.0, means(curve)))


def test_where_not_all_fit_those_with_the_least_work_are_admitted() -> None:
    """If not all requests fit, those with the least work are admitted: five query tokens fit into the target,
    and three are used."""
    averages = means(lambda query_tokens: 0.2 * query_tokens, depth=0)
    prompts = [prompt(1.0, 50), prompt(1.0, 10), prompt(inf, 1), prompt(1.0, 20), prompt(1.0, 30)]
    assert admit(prompts, [decoding(1.0)] * 3, 0.0, averages) == [False, True, False, True, False]


def test_an_infeasible_target_delays_no_prompt() -> None:
    averages = means(lambda query_tokens: 0.2 * query_tokens, depth=0)
    assert admit([prompt(1.0, 10)], [decoding(0.01)], 0.0, averages) == [True]
    assert admit([prompt(0.01, 10)], [decoding(1.0)], 0.0, averages) == [True]


def test_priority_comes_before_targets() -> None:
    averages = means(lambda query_tokens: 0.2 * query_tokens, depth=0)
    urgent, plain = prompt(1.0, 10, priority=-1), prompt(1.0, 1)
    assert admit([plain, urgent], [decoding(1.0)] * 4, 0.0, averages) == [False, True]
    assert admit([plain, urgent], [decoding(1.0)] * 5, 0.0, averages) == [False, True]
    assert admit([urgent], [decoding(1.0, priority=-1)] * 5, 0.0, averages) == [False]


def test_prompts_with_a_deadline_take_their_rate_of_the_step_until_it_is_missed() -> None:
    """Prompts with a deadline take their share of the step until the deadline is missed. A step of a second
    computes ten query tokens; eight decoding sequences leave two tokens a second."""
    averages = means(lambda query_tokens: 0.1 * query_tokens, depth=0)
    present = [decoding(1.0)] * 7
    urgent, lax = prompt(1.0, 40, deadline=110.0), prompt(1.0, 40, deadline=140.0)
    assert admit([urgent], present, 100.0, averages) == [False]
    assert admit([lax], present, 100.0, averages) == [True]
    assert admit([urgent], present, 110.0, averages) == [True]


def test_a_prompt_is_aged_in_after_the_grace_unless_its_deadline_can_still_be_met() -> None:
    early, timely, old = RequestView(9.5), RequestView(1.0, deadline=10.0), RequestView(10.0 - 2 * GRACE)
    assert aging_in([early, timely, old], 10.0) == 2
    assert aging_in([early, timely], 10.0) is None
    assert aging_in([timely], 10.1) == 0


def test_prompts_that_decode_here_are_admitted_once() -> None:
    fresh, running = RequestView(0.0), RequestView(0.0, running=True)
    assert needs_admission(fresh)
    assert not has_begun(fresh)
    assert has_begun(running)
    assert not needs_admission(running)
    assert has_begun(RequestView(0.0, outputs=1)), "preempted"
    for view in (RequestView(0.0, complete=False), RequestView(0.0, decodes_here=False, running=True)):
        assert not needs_admission(view)
        assert not has_begun(view)
