"""FlowGuard's arithmetic, and which candidates are skipped."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.scheduling.flowguard import FlowGuard
from streamserve.scheduling.routing import Arrival, RouteCandidate, WorkerLoad
from tests.scheduling.candidates import IDLE, candidate, candidate_lists

PAPER = (0.4, 0.1, 0.3, 0.2)
"""The paper's weights."""


def test_the_score_is_the_papers() -> None:
    prefill = WorkerLoad("p", queued=2, max_num_seqs=10, blocks_live=10, blocks_total=100, hit_rate=0.9)
    decode = WorkerLoad("d", decoding=5, max_num_seqs=10, blocks_live=30, blocks_total=100)
    candidates = RouteCandidate(prefill, decode, cached=50)
    assert FlowGuard(PAPER).score(Arrival(100), candidates) == pytest.approx(
        0.4 * 0.5 + 0.1 * (1 - 0.3) + 0.3 * (1 - 0.2) + 0.2 * (1 - 0.5)
    )


def test_the_cached_prefix_wins_until_the_candidate_is_overloaded() -> None:
    assert FlowGuard()(Arrival(100), [candidate(), candidate(cached=90)], 0).chosen == 1
    busy = [candidate(queued=3), candidate(cached=90, queued=4)]
    assert FlowGuard()(Arrival(100), busy, 0).chosen == 1, "one more in the queue"
    assert FlowGuard()(Arrival(100), [candidate(), busy[1]], 0).chosen == 0, "four more"
    assert FlowGuard(PAPER)(Arrival(100), [candidate(), busy[1]], 0).chosen == 1
    decision = FlowGuard(PAPER)(Arrival(100), [candidate(), candidate(cached=90, queued=5)], 0)
    assert (decision.chosen, decision.scores[1]) == (0, None), "2 * 0.5 > 0.85"
    assert FlowGuard()(Arrival(100), [candidate(), candidate(cached=90, blocks_live=90)], 0).chosen == 0


def test_a_silent_candidate_is_skipped_even_when_all_others_are_overloaded() -> None:
    silent, full = candidate(silence=9.0), candidate(queued=9)
    assert FlowGuard()(Arrival(100), [silent, full], 0).chosen == 1
    assert FlowGuard()(Arrival(100), [silent, silent], 1).chosen == 1, "better a silent one than none"


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
        candidate(cached=99, queued=9, decode=IDLE),
    ]
    assert FlowGuard()(Arrival(100), prefills, 0).chosen == 1
    decodes = [replace(IDLE, decoding=8), replace(IDLE, decoding=1), replace(IDLE, blocks_live=95)]
    assert FlowGuard()(Arrival(100), [RouteCandidate(IDLE, decode) for decode in decodes], 0).chosen == 1
