"""FlowGuard's score follows its formula, and certain candidates are skipped."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.scheduling.flowguard import FlowGuard
from streamserve.scheduling.routing import STEP_TOKENS, Arrival, RouteCandidate, WorkerLoad, delay
from tests.scheduling.candidates import IDLE, candidate, candidate_lists, queue

PAPER = (0.4, 0.1, 0.3, 0.2)
"""The published weights."""


def test_the_score_is_the_papers_with_the_delay_for_q() -> None:
    prefill = WorkerLoad(
        "p", **queue(60, 2000), max_num_seqs=10, blocks_live=10, blocks_total=100, hit_rate=0.9
    )
    decode = WorkerLoad("d", decoding=5, max_num_seqs=10, blocks_live=30, blocks_total=100)
    route = RouteCandidate(prefill, decode, cached=50)
    delayed = (50 + 60 + 512) / 5120
    assert FlowGuard(PAPER).score(Arrival(100), route) == pytest.approx(
        0.4 * 0.5 + 0.1 * (1 - 0.3) + 0.3 * (1 - delayed) + 0.2 * (1 - 0.5)
    )


@pytest.mark.parametrize(
    ("prompt", "cached", "pending", "tokens"),
    [
        # The prompt is served before one of 2000 tokens, and delays it by its own tokens.
        (1000, 0, 0, 1000 + 60 + 800 + 1000),
        (1000, 900, 0, 100 + 60 + 512 + 512),  # It shares steps and does not interrupt others.
        (4000, 0, 0, 4000 + 60 + 800 + 2000),  # It is served after all others.
        (1000, 900, 100, 100 + 60 + 800 + 2000),  # One of the workers computes the end of its prefix.
    ],
)
def test_the_shorter_of_two_prompts_delays_the_other(
    prompt: int, cached: int, pending: int, tokens: int
) -> None:
    load = replace(IDLE, **queue(60, 800, 2000))
    assert delay(Arrival(prompt), RouteCandidate(load, IDLE, cached, pending)) == tokens


@given(st.lists(st.integers(1, 600) | st.integers(1, 4000)), st.integers(1, 4000))
def test_each_queued_prompt_delays_by_what_the_shorter_one_has(prompts: list[int], own: int) -> None:
    expected = own + sum(min(tokens, max(own, STEP_TOKENS)) for tokens in prompts)
    assert delay(Arrival(own), candidate(**queue(*prompts))) == expected


def test_a_long_prompt_in_the_queue_counts_more_than_some_short_ones() -> None:
    one_long = candidate(**queue(3000))
    short = candidate(**queue(30, 30, 30))
    assert FlowGuard()(Arrival(1000), [one_long, short], 0).chosen == 1
    busy = candidate(**queue(1000, 1000, 1000))
    assert FlowGuard()(Arrival(1000), [one_long, busy], 0).chosen == 0


def test_the_cached_prefix_wins_while_it_saves_more_than_it_waits() -> None:
    def cached(*prompts: int) -> RouteCandidate:
        return candidate(cached=900, **queue(*prompts))

    assert FlowGuard()(Arrival(1000), [candidate(), cached()], 0).chosen == 1
    assert FlowGuard()(Arrival(1000), [candidate(), cached(800)], 0).chosen == 1
    assert FlowGuard()(Arrival(1000), [candidate(), cached(800, 800, 800)], 0).chosen == 0
    pending = replace(cached(800, 800), pending=900)
    assert FlowGuard()(Arrival(1000), [candidate(), pending], 0).chosen == 0, "the prefix is not yet computed"


def test_overloaded_candidates_are_skipped() -> None:
    decision = FlowGuard()(Arrival(100), [candidate(), candidate(cached=90, queued=5)], 0)
    assert (decision.chosen, decision.scores[1]) == (0, None), "2 * 0.5 > 0.85"
    assert FlowGuard()(Arrival(100), [candidate(), candidate(cached=90, blocks_live=90)], 0).chosen == 0


def test_a_silent_candidate_is_skipped_even_when_all_others_are_overloaded() -> None:
    silent, full = candidate(silence=9.0), candidate(queued=9)
    assert FlowGuard()(Arrival(100), [silent, full], 0).chosen == 1
    assert FlowGuard()(Arrival(100), [silent, silent], 1).chosen == 1, "a silent worker is better than none"


def test_where_all_are_overloaded_the_shortest_delay_wins() -> None:
    long = candidate(**queue(*[1000] * 5))
    short = candidate(**queue(*[100] * 6))
    decision = FlowGuard()(Arrival(1000), [long, short], 0)
    assert (decision.chosen, decision.scores) == (1, (None, None))


@given(candidate_lists, st.integers(0, 100))
def test_flowguard_prefers_eligible_candidates(candidates: list[RouteCandidate], turn: int) -> None:
    router = FlowGuard()
    decision = router(Arrival(100), candidates, turn)
    for candidate_, score in zip(candidates, decision.scores, strict=True):
        over = (
            candidate_.memory + 2 * candidate_.prefill.queue > router.overload
            or candidate_.silence > router.stale
        )
        assert score == (None if over else pytest.approx(router.score(Arrival(100), candidate_)))
    if any(score is not None for score in decision.scores):
        assert decision.scores[decision.chosen] == max(s for s in decision.scores if s is not None)


def test_equal_candidates_are_chosen_in_turn() -> None:
    chosen = Counter(FlowGuard()(Arrival(10), [candidate()] * 3, turn).chosen for turn in range(30))
    assert chosen == {0: 10, 1: 10, 2: 10}


@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.5, 0.5), (1.2, -0.2, 0.0, 0.0)])
def test_weights_that_are_no_weights_are_refused(weights: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        FlowGuard(weights)


def test_uneven_pools_choose_each_half_by_what_it_needs() -> None:
    prefills = [
        candidate(decode=IDLE),
        candidate(cached=80, decode=IDLE),
        candidate(cached=99, **queue(400, 400, 400), decode=IDLE),
    ]
    assert FlowGuard()(Arrival(100), prefills, 0).chosen == 1
    decodes = [replace(IDLE, decoding=8), replace(IDLE, decoding=1), replace(IDLE, blocks_live=95)]
    assert FlowGuard()(Arrival(100), [RouteCandidate(IDLE, decode) for decode in decodes], 0).chosen == 1
