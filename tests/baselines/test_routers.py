"""Properties of every router, and the choices of the published routers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines.routers import (
    ByClass,
    PublishedFlowGuard,
    RandomChoice,
    cache_aware,
    least_loaded,
    parse_router,
    round_robin,
)
from streamserve.scheduling.flowguard import FlowGuard
from streamserve.scheduling.predictive import Predictive
from streamserve.scheduling.routing import Arrival, RouteCandidate, Router, WorkerLoad
from tests.scheduling.candidates import candidate, candidate_lists

routers: list[Router] = [
    FlowGuard(),
    PublishedFlowGuard(),
    round_robin,
    RandomChoice(3),
    least_loaded,
    cache_aware,
    Predictive(),
    ByClass((0.02, 0.05)),
]


@given(candidate_lists, st.integers(0, 10**6), st.sampled_from(routers))
def test_every_router_chooses_one_of_the_candidates(
    candidates: list[RouteCandidate], turn: int, router: Router
) -> None:
    decision = router(Arrival(100, ttft=1.0, tpot=0.02), candidates, turn)
    assert 0 <= decision.chosen < len(candidates)
    assert len(decision.scores) == len(candidates)
    assert decision == router(Arrival(100, ttft=1.0, tpot=0.02), candidates, turn)


def test_flowguard_as_published_scores_the_rolling_hit_rate() -> None:
    prefill = WorkerLoad("p", queued=2, max_num_seqs=10, blocks_live=10, blocks_total=100, hit_rate=0.9)
    decode = WorkerLoad("d", decoding=5, max_num_seqs=10, blocks_live=30, blocks_total=100)
    score = 0.4 * 0.9 + 0.1 * (1 - 0.3) + 0.3 * (1 - 0.2) + 0.2 * (1 - 0.5)
    assert PublishedFlowGuard().score(RouteCandidate(prefill, decode, cached=50)) == pytest.approx(score)
    low_hit_rate = candidate(hit_rate=0.1, cached=100)
    decision = PublishedFlowGuard()(Arrival(100), [candidate(hit_rate=0.5), low_hit_rate], 0)
    assert decision.chosen == 0
    assert decision.scores[0] == pytest.approx(0.4 * 0.5 + 0.1 + 0.3 + 0.2)


def test_flowguard_as_published_falls_for_the_empty_queue_of_a_dead_worker() -> None:
    silent, full = candidate(silence=9.0), candidate(queued=9)
    decision = PublishedFlowGuard()(Arrival(100), [silent, full], 0)
    assert (decision.chosen, decision.scores) == (0, (None, None))


def test_equal_candidates_are_chosen_in_turn() -> None:
    for router in (PublishedFlowGuard(), least_loaded, cache_aware, round_robin):
        chosen = Counter(router(Arrival(10), [candidate()] * 3, turn).chosen for turn in range(30))
        assert chosen == {0: 10, 1: 10, 2: 10}


def test_random_choice_is_even_and_repeatable() -> None:
    chosen = Counter(RandomChoice(1)(Arrival(10), [candidate()] * 2, turn).chosen for turn in range(1000))
    assert 400 < chosen[0] < 600


def test_cache_aware_gives_up_the_cache_for_balance() -> None:
    assert cache_aware(Arrival(100), [candidate(), candidate(cached=90, queued=5)], 0).chosen == 1
    assert cache_aware(Arrival(100), [candidate(), candidate(cached=90, queued=50)], 0).chosen == 0


def test_slo_classes_use_separate_pipelines() -> None:
    router, six = (
        ByClass((0.02, 0.05)),
        [candidate(), candidate(), candidate(), candidate(queued=9), candidate(), candidate()],
    )
    for tpot, slo_class in ((0.01, 0), (0.02, 0), (0.021, 1), (0.05, 1), (9.0, 2), (None, 2)):
        chosen = {router(Arrival(10, tpot=tpot), six, turn).chosen for turn in range(6)}
        assert chosen == ({0} if slo_class == 0 else {slo_class, slo_class + 3}), (
            "the candidate with the fewest requests"
        )
    two = [router(Arrival(10, tpot=tpot), six[:2], 0).chosen for tpot in (0.01, 0.03, None)]
    assert two == [0, 1, 0], "classes share candidates if there are fewer candidates"


def test_routers_are_read_by_name_and_flowguard_with_its_weights() -> None:
    assert parse_router("predictive") == Predictive()
    assert parse_router("classes:20,50") == ByClass((0.02, 0.05))
    assert parse_router("flowguard:0.7,0.1,0.1,0.1") == FlowGuard((0.7, 0.1, 0.1, 0.1))
    assert parse_router("flowguard:0.7,0.1,0.1,0.1:0.5") == FlowGuard((0.7, 0.1, 0.1, 0.1), overload=0.5)
    assert parse_router("flowguard-as-published:0.7,0.1,0.1,0.1") == PublishedFlowGuard((0.7, 0.1, 0.1, 0.1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "choose one of flowguard"),
        ("random:1", "only flowguard"),
        ("classes", "ends in milliseconds"),
        ("classes:20:50", "ends in milliseconds"),
        ("classes:50,20", "ends in milliseconds"),
        ("classes:0,20", "ends in milliseconds"),
        ("classes:nan", "ends in milliseconds"),
        ("flowguard:1,2", "four weights"),
        ("flowguard:a,b,c,d", "numbers"),
        ("flowguard:0.5,0.5,0.5,0.5", "sum to 1"),
        ("flowguard:nan,0,0,1", "sum to 1"),
        ("flowguard:1,0,0,nan", "sum to 1"),
        ("flowguard:0.4,0.1,0.3,0.2:0", "positive"),
        ("flowguard:0.4,0.1,0.3,0.2:1:1", "only flowguard"),
    ],
)
def test_an_unknown_router_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_router(text)
