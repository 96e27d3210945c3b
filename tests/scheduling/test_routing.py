"""Routers: FlowGuard's arithmetic, which candidates are skipped, and what the other routers choose."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.scheduling.routing import (
    IDLE_WORKER,
    PUBLISHED_WEIGHTS,
    Arrival,
    ByClass,
    Costs,
    FlowGuard,
    Predictive,
    RandomChoice,
    RouteCandidate,
    Router,
    WorkerLoad,
    cache_aware,
    least_loaded,
    parse_router,
    round_robin,
)

COSTS = Costs(prefill=lambda tokens: tokens / 1000, decode=lambda seqs, kv: 0.01 + 0.001 * seqs)
IDLE = WorkerLoad("w", max_num_seqs=10, blocks_total=100, costs=COSTS)


def candidate(cached: int = 0, decode: WorkerLoad | None = None, **load: float) -> RouteCandidate:
    prefill = replace(IDLE, **load)
    return RouteCandidate(prefill, prefill if decode is None else decode, cached)


loads = st.builds(
    WorkerLoad,
    st.just("w"),
    queued=st.integers(0, 20),
    queued_tokens=st.integers(0, 5000),
    timely_tokens=st.integers(0, 5000),
    busy=st.floats(0, 5),
    timely_for=st.floats(0, 5),
    incoming=st.integers(0, 10),
    decoding=st.integers(0, 10),
    max_num_seqs=st.just(10),
    blocks_live=st.integers(0, 100),
    blocks_total=st.just(100),
    hit_rate=st.floats(0, 1),
    silence=st.floats(0, 5),
    costs=st.sampled_from((COSTS, COSTS, None)),
)
candidate_lists = st.lists(
    st.builds(RouteCandidate, loads, loads, st.integers(0, 100)), min_size=1, max_size=6
)
routers: list[Router] = [
    FlowGuard(),
    FlowGuard(as_published=True),
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


def test_the_score_is_the_papers() -> None:
    prefill = WorkerLoad("p", queued=2, max_num_seqs=10, blocks_live=10, blocks_total=100, hit_rate=0.9)
    decode = WorkerLoad("d", decoding=5, max_num_seqs=10, blocks_live=30, blocks_total=100)
    candidates = RouteCandidate(prefill, decode, cached=50)
    assert FlowGuard(PUBLISHED_WEIGHTS).score(Arrival(100), candidates) == pytest.approx(
        0.4 * 0.5 + 0.1 * (1 - 0.3) + 0.3 * (1 - 0.2) + 0.2 * (1 - 0.5)
    )
    assert FlowGuard(PUBLISHED_WEIGHTS, as_published=True).score(Arrival(100), candidates) == pytest.approx(
        0.4 * 0.9 + 0.1 * (1 - 0.3) + 0.3 * (1 - 0.2) + 0.2 * (1 - 0.5)
    )


def test_the_cached_prefix_wins_until_the_candidate_is_overloaded() -> None:
    assert FlowGuard()(Arrival(100), [candidate(), candidate(cached=90)], 0).chosen == 1
    busy = [candidate(queued=3), candidate(cached=90, queued=4)]
    assert FlowGuard()(Arrival(100), busy, 0).chosen == 1, "one more in the queue"
    assert FlowGuard()(Arrival(100), [candidate(), busy[1]], 0).chosen == 0, "four more"
    assert FlowGuard(PUBLISHED_WEIGHTS)(Arrival(100), [candidate(), busy[1]], 0).chosen == 1
    decision = FlowGuard(PUBLISHED_WEIGHTS)(Arrival(100), [candidate(), candidate(cached=90, queued=5)], 0)
    assert (decision.chosen, decision.scores[1]) == (0, None), "2 * 0.5 > 0.85"
    assert FlowGuard()(Arrival(100), [candidate(), candidate(cached=90, blocks_live=90)], 0).chosen == 0


def test_a_silent_candidate_is_skipped_even_when_all_others_are_overloaded() -> None:
    silent, full = candidate(silence=9.0), candidate(queued=9)
    assert FlowGuard()(Arrival(100), [silent, full], 0).chosen == 1
    assert FlowGuard(as_published=True)(Arrival(100), [silent, full], 0).chosen == 0, "as published"
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
    for router in (FlowGuard(), least_loaded, cache_aware, round_robin, Predictive()):
        chosen = Counter(router(Arrival(10), [candidate()] * 3, turn).chosen for turn in range(30))
        assert chosen == {0: 10, 1: 10, 2: 10}


def test_random_choice_is_even_and_repeatable() -> None:
    chosen = Counter(RandomChoice(1)(Arrival(10), [candidate()] * 2, turn).chosen for turn in range(1000))
    assert 400 < chosen[0] < 600


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


def test_the_predictive_router_predicts_the_halves_of_uneven_pools_separately() -> None:
    prefills = [
        candidate(decode=IDLE_WORKER),
        candidate(cached=80, decode=IDLE_WORKER),
        candidate(timely_tokens=500, decode=IDLE_WORKER),
    ]
    decision = Predictive()(Arrival(100), prefills, 0)
    assert (decision.chosen, decision.reason) == (1, "fewest missed targets, then earliest completion")
    decodes = [replace(IDLE, decoding=8), replace(IDLE, decoding=1), replace(IDLE, blocks_live=95)]
    assert (
        Predictive()(Arrival(100), [RouteCandidate(IDLE_WORKER, decode) for decode in decodes], 0).chosen == 1
    )


def test_cache_aware_gives_up_the_cache_for_balance() -> None:
    assert cache_aware(Arrival(100), [candidate(), candidate(cached=90, queued=5)], 0).chosen == 1
    assert cache_aware(Arrival(100), [candidate(), candidate(cached=90, queued=50)], 0).chosen == 0


def test_the_predictive_router_misses_the_fewest_targets() -> None:
    """The first candidate has the prompt cached but many requests decode there; the second computes it."""
    busy = candidate(cached=500, decode=replace(IDLE, decoding=40, max_num_seqs=64))
    free = candidate(decode=replace(IDLE, decoding=0))
    router = Predictive(output=10)
    assert router(Arrival(500), [busy, free], 0).chosen == 0, "earliest completion"
    assert router(Arrival(500, tpot=0.02), [busy, free], 0).chosen == 1, "its TPOT holds only there"
    assert router(Arrival(500, ttft=0.1), [busy, free], 0).chosen == 0, "its TTFT holds only here"


def test_the_predictive_router_counts_queued_tokens_and_free_capacity() -> None:
    router = Predictive()
    assert router(Arrival(100), [candidate(queued=1, timely_tokens=4000), candidate(queued=3)], 0).chosen == 1
    assert router(Arrival(100), [candidate(blocks_live=99), candidate(timely_tokens=4000)], 0).chosen == 1
    busy_worker = replace(IDLE, decoding=8)
    taken = [
        candidate(decode=replace(busy_worker, incoming=2)),
        candidate(timely_tokens=4000, decode=busy_worker),
    ]
    assert router(Arrival(100), taken, 0).chosen == 1, "ten may run there"


def test_the_predictive_router_counts_computed_and_late_prompts() -> None:
    router = Predictive()
    waiting = [candidate(timely_tokens=1000), candidate(timely_tokens=1100, busy=0.9)]
    assert router(Arrival(100), waiting, 0).chosen == 1, "most of it is computed by now"
    waiting = [candidate(timely_tokens=1000), candidate(timely_tokens=5000, timely_for=0.5)]
    assert router(Arrival(100), waiting, 0).chosen == 1, "half a second from now they are late"
    late = [candidate(queued_tokens=1000, timely_tokens=1000), candidate(queued_tokens=5000)]
    assert router(Arrival(100, ttft=0.5), late, 0).chosen == 1, "no request there can still be in time"


def test_a_speculation_speedup_attracts_requests() -> None:
    fast, slow = candidate(speedup=3.0), candidate()
    assert Predictive()(Arrival(100), [slow, fast], 0).chosen == 1


def test_each_worker_is_predicted_by_its_own_cost() -> None:
    twice = Costs(prefill=lambda tokens: tokens / 500, decode=lambda seqs, kv: 0.02 + 0.002 * seqs)
    assert Predictive()(Arrival(100), [candidate(costs=twice), candidate()], 0).chosen == 1


def test_flowguard_chooses_where_a_cost_is_unknown() -> None:
    candidate_lists = [candidate(), candidate(cached=90, costs=None)]
    decision = Predictive()(Arrival(100), candidate_lists, 0)
    assert decision.chosen == 1
    assert decision.reason == "a step cost is unknown: highest score"


def test_slo_classes_use_separate_pipelines() -> None:
    router, six = (
        ByClass((0.02, 0.05)),
        [candidate(), candidate(), candidate(), candidate(queued=9), candidate(), candidate()],
    )
    for tpot, slo_class in ((0.01, 0), (0.02, 0), (0.021, 1), (0.05, 1), (9.0, 2), (None, 2)):
        chosen = {router(Arrival(10, tpot=tpot), six, turn).chosen for turn in range(6)}
        assert chosen == ({0} if slo_class == 0 else {slo_class, slo_class + 3}), (
            "the fewest requests of its candidates"
        )
    two = [router(Arrival(10, tpot=tpot), six[:2], 0).chosen for tpot in (0.01, 0.03, None)]
    assert two == [0, 1, 0], "with fewer candidates than classes, some share"


def test_routers_are_read_by_name_and_flowguard_with_its_weights() -> None:
    assert parse_router("predictive") == Predictive()
    assert parse_router("classes:20,50") == ByClass((0.02, 0.05))
    assert parse_router("flowguard:0.7,0.1,0.1,0.1") == FlowGuard((0.7, 0.1, 0.1, 0.1))
    assert parse_router("flowguard:0.7,0.1,0.1,0.1:0.5") == FlowGuard((0.7, 0.1, 0.1, 0.1), overload=0.5)
    assert parse_router("flowguard-as-published:0.7,0.1,0.1,0.1") == FlowGuard(
        (0.7, 0.1, 0.1, 0.1), as_published=True
    )


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
        ("flowguard:0.4,0.1,0.3,0.2:0", "positive"),
        ("flowguard:0.4,0.1,0.3,0.2:1:1", "only flowguard"),
    ],
)
def test_an_unknown_router_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_router(text)
